//! A process of a measurement in a container of podman, without any right.

use std::env;
use std::process::Command;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use rocinante_cli::output::{Failure, Result};

use super::job::Job;
use super::programs::{is_there, not_there};

const PODMAN: &str = "podman";
/// Where the container has this program.
const PROGRAM: &str = "/rocinante-bench";
/// The user of the process.
const USER: &str = "1000";
/// The namespaces around podman, by unshare(1): all that it starts ends with the caller's child.
const OF_ITS_OWN: [&str; 6] =
    ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"];
/// podman keeps its state and its locks in directories that end with it. Where the machine has both
/// versions of cgroups it sees the first: crun 1.8 refuses the second if that has a controller.
const PREPARE: &str = "umount /sys/fs/cgroup/unified 2>/dev/null
    for at in /run /dev/shm; do mount -t tmpfs tmpfs $at || exit; done
    exec \"$@\"";
/// The container has the host's files, below a layer of its own, and the network namespace of the
/// caller.
const OPTIONS: [&str; 21] = [
    "--storage-driver=vfs",
    "--root=/run/podman-store",
    "--runroot=/run/podman-run",
    "--tmpdir=/run/podman-state",
    "--network-config-dir=/run/podman-net",
    "run",
    "--rm",
    "--interactive",
    "--log-driver=none",
    "--cgroups=disabled",
    "--network=host",
    "--no-hosts",
    "--dns=none",
    "--user",
    USER,
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--security-opt=label=disable",
    "--security-opt=apparmor=unconfined",
    "--rootfs",
    "/:O",
];

/// The command that does the work of `job` in a container. Error: there is no podman, or a limit of
/// this process is not known.
pub(super) fn command(job: &Job) -> Result<Command> {
    if !is_there(PODMAN) {
        return Err(not_there(PODMAN, PODMAN));
    }
    let failed = |error: &dyn std::fmt::Display| Failure::Failed(format!("{PODMAN}: {error}"));
    let own = env::current_exe().map_err(|error| failed(&error))?;
    let job = Job { work: job.work.inside(), urgent: false, ..job.clone() };
    let job = serde_json::to_string(&job).expect("a job is JSON");
    let [options @ .., rootfs, root] = &OPTIONS;
    let mut command = Command::new("unshare");
    command.args(OF_ITS_OWN).args(["sh", "-c", PREPARE, "sh", PODMAN]).args(options);
    // podman's defaults may be more than this process may give.
    for (name, of) in [("nofile", Resource::RLIMIT_NOFILE), ("nproc", Resource::RLIMIT_NPROC)] {
        let (now, most) = getrlimit(of).map_err(|error| failed(&error))?;
        let [now, most] = [now, most].map(|limit| match limit {
            RLIM_INFINITY => "-1".to_owned(),
            limit => limit.to_string(),
        });
        command.arg(format!("--ulimit={name}={now}:{most}"));
    }
    command.arg(format!("--volume={}:{PROGRAM}:ro", own.display()));
    command.args([rootfs, root, PROGRAM, "measure-worker", "--job", &job]);
    Ok(command)
}
