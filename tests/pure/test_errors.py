from tfdp import errors


def test_every_error_is_a_tfdp_error():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.TfdpError)


def test_bad_values_are_value_errors():
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.DataError, ValueError)
