"""What `tfdp launch` would start: command lines and variables, nothing is run."""

import re
import shlex
import sys

import pytest

from tests.support.fresh_python import run_program
from tfdp.cluster import Cluster, find_cluster, restarts
from tfdp.errors import ConfigurationError
from tfdp.launch import command as launch_command
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.launch.handover import become, mpi_command, slurm_command
from tfdp.launch.local import local_commands, own_gpus, share_of_gpus
from tfdp.launch.program import Program, parse_program
from tfdp.launch.ssh import parse_hosts, remote_command, ssh_commands
from tfdp.tools.commands import cli

SCRIPT = Program("my train.py", ("--name", "it's"))
KEY = "0123456789abcdef"
MODULE = Program("package.train", ("--epochs", "3"), is_module=True)


def parse(*arguments):
    return cli.make_parser().parse_args(["launch", *arguments])


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["a.py"], Program("a.py")),
        (["a.py", "-m", "--workers", "9"], Program("a.py", ("-m", "--workers", "9"))),
        (["-m", "a.b", "--port", "1"], Program("a.b", ("--port", "1"), True)),
        (["--", "a.py", "--help"], Program("a.py", ("--help",))),
    ],
)
def test_what_follows_the_program_is_its_own(arguments, expected):
    options = parse("--workers", "2", *arguments)
    assert options.workers == launch_command.Workers(2, 2)
    assert options.port is None
    assert parse_program(options.program, options.is_module) == expected


@pytest.mark.parametrize(
    "words",
    [["-np", "3"], ["-n", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node=3"]]
    + [["--num_processes", "3"], ["--workers", "3"]],
)
def test_the_words_of_other_launchers_are_taken(words):
    options = parse(*words, "a.py", "-n", "9")
    assert options.workers == launch_command.Workers(3, 3)
    assert options.program == ["a.py", "-n", "9"]
    assert parse("a.py").workers is None


@pytest.mark.parametrize(
    "words, meant",
    [
        (["launch", "--wrokers", "2", "a.py"], "--wrokers. Did you mean --workers[?]"),
        (["launch", "--log-dirs=x", "a.py"], "--log-dirs. Did you mean --log-dir[?]"),
        (["launch", "--xyzzy", "a.py"], "there is no option --xyzzy$"),
        (["info", "--jsno"], "Did you mean --json[?]"),
        (["lanch", "a.py"], "Did you mean launch[?]"),
        (["launch", "--restart", "al", "a.py"], "Did you mean all[?]"),
    ],
)
def test_a_slip_of_the_pen_is_told(words, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.make_parser().parse_args(words)
    assert stopped.value.code == 2
    assert re.search(meant, capsys.readouterr().err, re.M)


@pytest.mark.parametrize("words", [[], ["--"], ["--epochs", "3"]])
def test_no_program_is_refused(words):
    with pytest.raises(ConfigurationError, match="no program"):
        parse_program(words, is_module=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0", "a.py"],
        ["--workers", "two", "a.py"],
        ["--devices-per-worker", "0", "a.py"],
        ["--workers-per-gpu", "0", "a.py"],
        ["--port", "65536", "a.py"],
        ["--grace-seconds", "-1", "a.py"],
        ["--grace-seconds", "nan", "a.py"],
        ["--max-restarts", "-1", "a.py"],
        ["--workers", "3:2", "a.py"],
        ["--workers", "0:2", "a.py"],
        ["--workers", "2:", "a.py"],
        ["--workers", "1:2:3", "a.py"],
        ["--slurm", "--mpi", "a.py"],
        ["--hosts", "a,b", "--kubernetes", "image", "a.py"],
    ],
)
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*arguments)
    assert stopped.value.code == 2
    assert "usage: tfdp launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no program to launch"),
        (["missing.py"], "there is no script 'missing.py' .looked in .*[)]. For a"),
        (["trian.py"], "there is no script 'trian.py'.*Did you mean train.py[?]"),
        (["--slurm", "--port", "2000", "a.py"], "--port has no effect with --slurm"),
        (["--mpi", "--log-dir", "x", "a.py"], "--log-dir has no effect with --mpi"),
        (["--hosts", "a,b", "--workers", "3", "a.py"], "--workers 3 contradicts"),
        (["--hosts", "a,,b", "a.py"], "separated by commas.*'a,,b'"),
        (["--hosts=-oProxy,b", "a.py"], "separated by commas"),
        (["--hosts", "a,b,a", "a.py"], "names a twice"),
        (["--hosts", "localhost,b", "a.py"], "'localhost' is another machine"),
        (["--kubernetes", "image", "a.py"], "--kubernetes needs --workers"),
        (["--workers", "1:2", "a.py"], "--workers 1:2 acts when.*--max-restarts"),
        (["--slurm", "--max-restarts", "1", "a.py"], "no effect with --slurm: srun"),
        (["--mpi", "--max-restarts", "1", "a.py"], "no effect with --mpi: mpiexec"),
        *(
            ([*where, "--workers", "1:2", "a.py"], "the scheduler decides")
            for where in (["--slurm"], ["--mpi"], ["--kubernetes", "image"])
        ),
        *(
            ([*where, "--workers-per-gpu", "2", "a.py"], f"no effect with {where[0]}")
            for where in (["--slurm"], ["--mpi"], ["--hosts", "a"])
        ),
        (
            ["--hosts", "a,b", "--workers", "1:3", "--max-restarts", "1", "a.py"],
            "--workers 1:3 contradicts --hosts.*MIN:2",
        ),
        (
            # The second may become the first.
            ["--hosts", "a,::1", "--workers", "1:2", "--max-restarts", "1", "a.py"],
            "'::1' is another machine",
        ),
        (["--kubernetes", "an image", "--workers", "2", "a.py"], "'an image'"),
        *(
            (
                ["--kubernetes", "image", "--workers", "2", "--volume", text, "a.py"],
                "--volume needs CLAIM:/PATH",
            )
            for text in ("data", "data:", "data:path", "Data:/x", "data:/x:ro", "")
        ),
        (["--jobset", "a.py"], "--jobset has no effect without --kubernetes"),
        (["--gpus", "2", "a.py"], "--gpus has no effect without"),
        (["--name", "x", "a.py"], "--name has no effect without --kubernetes"),
        (["--cpus", "2", "a.py"], "--cpus has no effect without"),
        (["--mpi", "--memory", "2GB", "a.py"], "--memory has no effect without"),
        (
            ["--kubernetes", "image", "--workers", "2", "--memory", "16", "a.py"],
            "16 what",
        ),
        (["--slurm", "--volume", "a:/b", "a.py"], "--volume has no effect without"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = parse(*arguments)
    with pytest.raises(ConfigurationError, match=message):
        options.run(options)


@pytest.mark.parametrize("option, program", [("--slurm", "srun"), ("--mpi", "mpiexec")])
def test_a_missing_scheduler_is_named(option, program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    options = parse(option, "a.py")
    with pytest.raises(ConfigurationError, match=f"{program} was not found on PATH"):
        options.run(options)


def test_a_missing_ssh_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    options = parse("--hosts", "a,b", "a.py")
    with pytest.raises(ConfigurationError, match="ssh was not found on PATH"):
        options.run(options)


def test_a_worker_does_not_launch_workers(tmp_path, monkeypatch):
    script = tmp_path / "a.py"
    script.write_text("")
    for name, value in cluster_variables(3, 2, "node1:20000").items():
        monkeypatch.setenv(name, value)
    options = parse("--workers", "2", str(script))
    with pytest.raises(ConfigurationError, match=r"worker 2 of 3 \(tfdp\)"):
        options.run(options)


def test_local_workers_find_each_other():
    commands = local_commands(
        SCRIPT,
        {"PATH": "/bin", "TFDP_RANK": "7"},
        workers=3,
        port=20001,
        devices_per_worker=2,
        cores=8,
        job_key=KEY,
    )
    found = [find_cluster(start.environment) for start in commands]
    assert found == [
        Cluster(3, rank, "127.0.0.1:20001", "tfdp", devices_per_worker=2)
        for rank in range(3)
    ]
    assert {cluster.job_key for cluster in found} == {KEY}
    assert [start.rank for start in commands] == [0, 1, 2]
    assert {start.environment["PATH"] for start in commands} == {"/bin"}
    for start in commands:
        assert start.command == [sys.executable, "my train.py", "--name", "it's"]


@pytest.mark.parametrize(
    "workers, cores, expected", [(2, 8, "4"), (3, 8, "2"), (4, 2, "1"), (1, 8, None)]
)
def test_workers_share_the_cores(workers, cores, expected):
    made = local_environment({}, {}, workers=workers, rank=0, cores=cores)
    assert made.get("OMP_NUM_THREADS") == expected
    assert made.get("TF_NUM_INTRAOP_THREADS") == expected


def test_what_the_user_has_set_stays():
    own = {"OMP_NUM_THREADS": "6", "TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONUNBUFFERED": ""}
    made = local_environment(own, {}, workers=2, rank=1, cores=8)
    assert {name: made[name] for name in own} == own
    assert made["TF_NUM_INTRAOP_THREADS"] == "4"


@pytest.mark.parametrize(
    "visible, expected",
    [("", []), ("-1", []), ("3", ["3"]), ("0, 2", ["0", "2"]), ("1,-1,0", ["1"])],
)
def test_gpus_are_those_that_the_user_names(visible, expected):
    assert own_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_gpus_are_asked_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_gpus({}) == []
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    query.chmod(0o755)
    assert own_gpus({}) == ["GPU-1", "GPU-2"]
    query.write_text("#!/bin/sh\nexit 9\n")
    assert own_gpus({}) == []


def test_workers_share_the_gpus():
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    commands = local_commands(
        *(SCRIPT, environment),
        **{"workers": 2, "port": 1, "devices_per_worker": None, "cores": 2},
        job_key=KEY,
    )
    visible = [start.environment["CUDA_VISIBLE_DEVICES"] for start in commands]
    assert visible == ["4,5", "6,7"]
    assert share_of_gpus(["0", "1"], workers=1, rank=0) == {}
    assert share_of_gpus([], workers=3, rank=2) == {}
    for gpus in (["0"], ["0", "1", "2"]):
        with pytest.raises(ConfigurationError, match="share . GPUs evenly"):
            share_of_gpus(gpus, workers=2, rank=0)


def shared_gpus(environment, workers, per_gpu, **options):
    commands = local_commands(
        *(SCRIPT, environment),
        **{"workers": workers, "port": 1, "devices_per_worker": None, "cores": 2},
        **{"job_key": KEY, "workers_per_gpu": per_gpu, **options},
    )
    return [start.environment for start in commands]


GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def test_workers_share_one_gpu_when_told_so():
    made = shared_gpus({"CUDA_VISIBLE_DEVICES": "5,7"}, 4, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == ["5", "5", "7", "7"]
    # Or the first of them would take nearly all of its memory.
    assert {each[GROWTH] for each in made} == {"true"}
    made = shared_gpus({"CUDA_VISIBLE_DEVICES": "5", GROWTH: "false"}, 2, 2)
    assert {each[GROWTH] for each in made} == {"false"}
    assert GROWTH not in shared_gpus({"CUDA_VISIBLE_DEVICES": "5,7"}, 2, 1)[0]
    # A place keeps its GPU when another one is left out.
    made = shared_gpus({"CUDA_VISIBLE_DEVICES": "5,7"}, 4, 2, places=[1, 3])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == ["5", "7"]


@pytest.mark.parametrize(
    "visible, workers, words",
    [
        ("", 2, "this machine has none"),
        ("5", 3, "2 on 1 GPUs is for --workers 2. Received: 3"),
        ("5,7", 2, "2 on 2 GPUs is for --workers 4. Received: 2"),
        ("5", 1, "2 on 1 GPUs is for --workers 2. Received: 1"),
    ],
)
def test_workers_that_are_not_as_many_as_share_gpus_are_refused(
    visible, workers, words
):
    with pytest.raises(ConfigurationError, match=words):
        shared_gpus({"CUDA_VISIBLE_DEVICES": visible}, workers, 2)


def test_a_place_keeps_its_gpus_when_another_is_left_out():
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "TFDP_RESTARTS": "9"}
    commands = local_commands(
        *(SCRIPT, environment),
        **{"workers": 4, "port": 1, "devices_per_worker": None, "cores": 9},
        **{"job_key": KEY, "places": [0, 2, 3], "restarts": 1},
    )
    made = [start.environment for start in commands]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == ["4", "6", "7"]
    assert [find_cluster(each).rank for each in made] == [0, 1, 2]
    # The others share what cores there are.
    assert {find_cluster(each).workers for each in made} == {3}
    assert {each["OMP_NUM_THREADS"] for each in made} == {"3"}
    assert {restarts(each) for each in made} == {1}


def test_only_worker_0_greets():
    first, second = (
        local_environment({}, {}, workers=2, rank=rank, cores=2) for rank in range(2)
    )
    assert "TF_CPP_MIN_LOG_LEVEL" not in first
    assert second["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert second["TFDP_LOG_LEVEL_OF_LAUNCHER"] == "1"
    own = local_environment(
        {"TF_CPP_MIN_LOG_LEVEL": "0"}, {}, workers=2, rank=1, cores=2
    )
    assert "TFDP_LOG_LEVEL_OF_LAUNCHER" not in own


@pytest.mark.parametrize("is_launchers, level", [(True, "2"), (False, "1")])
def test_quiet_overrides_the_level_of_the_launcher_only(is_launchers, level):
    variables = {"TF_CPP_MIN_LOG_LEVEL": "1"}
    if is_launchers:
        variables["TFDP_LOG_LEVEL_OF_LAUNCHER"] = "1"
    program = "import os, tfdp; tfdp.quiet(); print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    done = run_program(program, environment=variables)
    assert done.stdout.split() == [level], done.stderr


def test_ssh_command_lines():
    commands = ssh_commands(
        SCRIPT,
        {"HOME": "/root"},
        parse_hosts("me@alpha, beta"),
        folder="/data/my runs",
        port=20001,
        devices_per_worker=4,
        grace_seconds=2.5,
        job_key=KEY,
    )
    assert [start.command[-2] for start in commands] == ["me@alpha", "beta"]
    for rank, start in enumerate(commands):
        assert start.keeps_stdin and start.first_input == f"{KEY}\n".encode()
        assert KEY not in repr(start)  # its command line is in it
        assert start.command[0] == "ssh"
        assert "BatchMode=yes" in start.command
        # What a shell on the host makes of the line.
        words = shlex.split(start.command[-1])
        assert words[:5] == ["cd", "/data/my runs", "&&", "exec", "env"]
        settings = dict(word.split("=", 1) for word in words[5:] if "=" in word)
        assert find_cluster(settings) == Cluster(
            2, rank, "alpha:20001", "tfdp", devices_per_worker=4
        )
        remote = ["-m", "tfdp.launch.remote", "2.5"]
        assert words[-7:-4] == remote
        assert words[-4:] == SCRIPT.command(sys.executable)


def test_an_ipv6_host_gets_its_brackets():
    (start,) = ssh_commands(
        SCRIPT,
        {},
        ["fd00::1"],
        folder="/",
        port=20001,
        devices_per_worker=None,
        grace_seconds=5,
        job_key=KEY,
    )
    assert "'TFDP_COORDINATOR=[fd00::1]:20001'" in start.command[-1]


def test_a_remote_module():
    line = remote_command(MODULE, {}, folder="/data", grace_seconds=5)
    assert line.endswith(f"{sys.executable} -m package.train --epochs 3")


def test_slurm_command_line():
    command = slurm_command(MODULE, workers=4, devices_per_worker=8)
    launcher = ["srun", "--ntasks=4", "--kill-on-bad-exit=1", "--label", "env"]
    assert command[:5] == launcher
    assert "TFDP_DEVICES_PER_WORKER=8" in command
    assert command[-5:] == MODULE.command(sys.executable)
    assert "--ntasks" not in str(
        slurm_command(MODULE, workers=None, devices_per_worker=None)
    )


def test_mpi_command_line():
    command = mpi_command(SCRIPT, workers=4, devices_per_worker=2)
    assert command[:4] == ["mpiexec", "-n", "4", "env"]
    assert "TFDP_DEVICES_PER_WORKER=2" in command
    assert command[-4:] == SCRIPT.command(sys.executable)
    plain = mpi_command(SCRIPT, workers=None, devices_per_worker=None)
    assert plain[:2] == ["mpiexec", "env"]
    assert not any("TFDP" in word for word in plain)


def test_become_needs_the_program():
    with pytest.raises(ConfigurationError, match="no-such-program.*Do this"):
        become(["no-such-program"], "Do this.")


def test_launching_loads_no_tensorflow(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("print('ran')")
    done = run_program(
        "import sys\n"
        "from tfdp.tools.commands.cli import main\n"
        f"code = main(['launch', '--workers', '2', {str(script)!r}])\n"
        "print(code, sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))\n"
    )
    assert sorted(done.stdout.splitlines()) == ["0 []", "[0] ran", "[1] ran"]


def test_the_manifest_is_printed_as_yaml(capsys):
    yaml = pytest.importorskip("yaml")
    options = parse("--kubernetes", "image:1", "--workers", "2", "-m", "a.train", "-x")
    assert options.run(options) == 0
    _, _, job = yaml.safe_load_all(capsys.readouterr().out)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "a.train", "-x"]


def test_a_jobset_is_printed_with_gpus_and_volumes(capsys):
    yaml = pytest.importorskip("yaml")
    words = "--kubernetes image:1 --workers 2 --jobset --gpus 4 --volume records:/data"
    options = parse(*words.split(), "a.py")
    assert options.run(options) == 0
    _, jobset = yaml.safe_load_all(capsys.readouterr().out)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        *("/data", "/dev/shm")
    }


@pytest.mark.parametrize(
    "text, least, most, shown",
    [("3", 3, 3, "3"), ("2:4", 2, 4, "2:4"), ("2:2", 2, 2, "2")],
)
def test_the_number_of_workers(text, least, most, shown):
    found = parse("--workers", text, "a.py").workers
    assert (found.least, found.most, str(found)) == (least, most, shown)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--workers", ""], "needs N or MIN:MAX, from 1 up, not ''"),
        (["--workers", "4:2"], "needs N or MIN:MAX"),
        (["--port", "0"], "needs an integer, 1 to 65535, not 0"),
        (["--max-restarts", "-1"], "needs an integer of at least 0, not -1"),
    ],
)
def test_numbers_out_of_range_are_said_with_the_range(words, said, capsys):
    with pytest.raises(SystemExit):
        parse(*words, "a.py")
    assert said in capsys.readouterr().err


def test_more_workers_than_a_machine_starts_are_refused(tmp_path, capsys):
    (tmp_path / "a.py").touch()
    assert cli.main(["launch", "--workers", "999", str(tmp_path / "a.py")]) == 1
    assert "At most 256 run on one" in capsys.readouterr().err


@pytest.mark.parametrize("words, seconds", [([], 30), (["--grace-seconds", "60"], 60)])
def test_pods_have_time_to_save(words, seconds, capsys):
    options = parse("--kubernetes", "image:1", "--workers", "2", *words, "a.py")
    assert options.run(options) == 0
    assert f"terminationGracePeriodSeconds: {seconds}\n" in capsys.readouterr().out


def test_the_default_grace_time(monkeypatch):
    options = parse("a.py")
    monkeypatch.setattr(launch_command, "_launch_here", lambda options, _: 0)
    assert options.run(options) == 0
    assert options.grace_seconds == launch_command.GRACE_SECONDS == 30.0


def test_the_help_names_the_words_of_other_launchers(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    said = capsys.readouterr().out
    words = ("--workers N", "-n N", "-np N", "--nproc-per-node N")
    assert ", ".join(words) in said
