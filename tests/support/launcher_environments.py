"""Environments as the launchers really print them (names and addresses made neutral).

Each is reduced to the launcher's own variables, for one worker that is not worker 0, so
that a reader that mixes up rank and size, or forgets one, is seen.
"""

import json

# `srun env` of Slurm 23: two nodes, two tasks each; task 3.
SLURM = {
    "SLURM_CLUSTER_NAME": "ada",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOBID": "200505",
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.205.134",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gnode[10,20]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_SRUN_COMM_HOST": "10.0.205.134",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "43247",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "2288",
}
# `env` in the batch script of a job of four nodes: no step, and process 0 of 4.
SLURM_BATCH = {
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_TASK_PID": "16360",
}
# The shell of `salloc` where it is a step of its own.
SLURM_INTERACTIVE = {
    "SLURM_JOB_ID": "1731563",
    "SLURM_JOB_NODELIST": "gpu71",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu71",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_TASKS_PER_NODE": "8",
}
# `mpiexec -n 3 env` of Open MPI 5.0.11; rank 2.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_num_procs": "3",
    "OMPI_UNIVERSE_SIZE": "3",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "node1",
    "PMIX_NAMESPACE": "prterun-node1-8328@1",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI41": "prterun-node1-8328@0.0;tcp4://127.0.0.1:42515",
    "PRTE_LAUNCHED": "1",
}
# `mpiexec -n 3 env` of MPICH 5 (Hydra); rank 2.
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "3",
    "MPI_LOCALRANKID": "2",
    "PMI_FD": "16",
    "PMI_HOSTNAME": "node1",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}
# `torchrun --nnodes 2 --nproc-per-node 2`; also what Kubeflow's PyTorchJob sets.
TORCHRUN = {
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "4",
}
# A pod of an Indexed Job that `tfdp launch --kubernetes` wrote.
KUBERNETES = {
    "HOSTNAME": "digits-2",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "TFDP_COORDINATOR": "digits-0.digits:25000",
    "TFDP_WORKERS": "3",
}
# The same as the replicated job `workers` of the JobSet `train`.
JOBSET = {
    "HOSTNAME": "train-workers-0-2",
    "JOBSET_NAME": "train",
    "JOB_COMPLETION_INDEX": "2",
    "JOB_INDEX": "0",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "REPLICATED_JOB_NAME": "workers",
    "TFDP_WORKERS": "3",
}
TFDP = {
    "TFDP_COORDINATOR": "127.0.0.1:23456",
    "TFDP_RANK": "1",
    "TFDP_WORKERS": "2",
}


def tf_config(cluster, kind, index, **more):
    config = {"cluster": cluster, "task": {"type": kind, "index": index}, **more}
    return {"TF_CONFIG": json.dumps(config)}


# A TFJob of Kubeflow without a chief.
KUBEFLOW = tf_config(
    {"worker": ["mnist-worker-0.ns.svc:2222", "mnist-worker-1.ns.svc:2222"]},
    *("worker", 1),
    environment="cloud",
)
# Vertex AI: the chief's pool and the workers'.
VERTEX = tf_config(
    {
        "chief": ["cmle-training-workerpool0-12ab-0:2222"],
        "worker": [
            "cmle-training-workerpool1-12ab-0:2222",
            "cmle-training-workerpool1-12ab-1:2222",
        ],
    },
    *("worker", 1),
    environment="cloud",
    job="{}",
)
# SageMaker with multi_worker_mirrored_strategy enabled.
SAGEMAKER = tf_config(
    {"worker": ["algo-1:8890", "algo-2:8890"]}, "worker", 1, environment="cloud"
)
