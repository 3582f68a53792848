#!/bin/bash
# Trains on several machines under Slurm, and goes on by itself after preemption or the time limit:
#
#   sbatch examples/slurm.sh pg19 --train.precision bf16 --train.parallel fsdp --out runs/pg19
#
# One task per GPU. Slurm starts the tasks, so torchrun is not needed: it would hide their exit code. A task that is told to
# stop (SIGTERM, 120 to 180 seconds before the time limit) saves the run and exits with 75; then the job is queued again,
# and --resume goes on from the checkpoint. On preemption Slurm sends SIGTERM at once, and SIGKILL after the partition's or
# QOS's GraceTime, which must be long enough to save. All machines must reach the run's folder. --train.batch must be a
# multiple of the tasks. Not tested on a real Slurm.
#SBATCH --job-name=compressive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

: "${SLURM_JOB_ID:?start it with sbatch}"
trap : TERM # this shell outlives the signal, to see the tasks' exit code

# The first machine of the job is where the processes meet. (SLURM_LAUNCH_NODE_IPADDR is not used: in a batch script it can
# only come from the shell that called sbatch, and then names another machine.)
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# Since Slurm 22.05 srun does not inherit --cpus-per-task: without this every task gets one core.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# shellcheck disable=SC2016  # the variables are each task's own
srun --kill-on-bad-exit=0 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python -m compressive train "$@" --resume
' task "$@" &
tasks=$!
wait "$tasks"
while kill -0 "$tasks" 2>/dev/null; do wait "$tasks"; done # a signal ends a wait, not the tasks
wait "$tasks"                                              # bash keeps the exit code of a process that has ended
code=$?

if [ "$code" -eq 75 ]; then
    echo "interrupted and saved: queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
