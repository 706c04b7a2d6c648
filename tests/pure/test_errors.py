from tfdp import errors


def test_every_error_is_a_tfdp_error():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, (errors.TfdpError, UserWarning))


def test_bad_values_are_value_errors():
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.DataError, ValueError)
