//! The process that outlives a program of `rocinante run`: it ends the connections of processes
//! that die without a word, as the kernel does for a card.
//!
//! It is no child of the program: the one that `run` starts starts it, and ends. It has a session
//! of its own, none of the program's descriptors, and sleeps until a process that has a device goes
//! ([`Guardian`]). It ends with the program and its processes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use nix::sys::signal::SigSet;
use nix::unistd::{setgid, setgroups, setuid};
use rocinante::OpenOptions;
use rocinante::device::Backend;
use rocinante_netdev::handed::AGENT_VARIABLE;
use rocinante_netdev::sysfs;
use rocinante_netdev::{Errand, Guardian, Interface, Left, close_elsewhere, keep_from_children};
use rustix::process::{
    DumpableBehavior, PidfdFlags, Signal, child_subreaper, getpid, kill_process, pidfd_open,
    set_dumpable_behavior, setsid,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// How long a guardian tries to end connections. A peer that is there answers at once.
const PATIENCE: Duration = Duration::from_secs(3);
/// The most guardians for other users. Any user can connect.
const OTHER_USERS_MAX: usize = 128;
/// The socket of the system's log (syslog(3)): a guardian has no stderr.
const LOG: &str = "/dev/log";
/// Its one line there: a warning of a daemon.
const TOO_MANY: &str = "<28>rocinante guardian: there are more processes, or addresses of one, \
                        than it looks after: if such a process is killed, its peers have to ask";
/// How often it looks whether the peers have answered. Where many programs die at once each look
/// takes time from another guardian.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The guardian of a program that `rocinante run` starts
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The part of this process
    #[arg(long, value_enum, default_value_t)]
    part: Part,
    /// The user that this process becomes, with no right of another one.
    #[arg(long, requires = "group")]
    user: Option<u32>,
    /// The group, likewise.
    #[arg(long, requires = "user")]
    group: Option<u32>,
    /// How long this process may take: the kernel ends it then. Without it, as long as it needs
    #[arg(long)]
    seconds: Option<u32>,
    #[command(flatten)]
    tree: Tree,
}

/// The tree of files that the guardian keeps up to date for programs that no library reaches.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Tree {
    /// Its directory, if there is one that is mounted.
    #[arg(long)]
    pub tree: Option<PathBuf>,
    /// The list of devices.
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub devices: String,
}

impl Tree {
    /// Adds it to the command line of a guardian.
    fn tell(&self, mut command: Command) -> Command {
        if let Some(tree) = &self.tree {
            command.arg("--tree").arg(tree).arg("--devices").arg(&self.devices);
        }
        command
    }

    /// Has a thread keep it until the program ends, or this process.
    fn keep(self, program: &OwnedFd) -> io::Result<()> {
        let Some(tree) = self.tree else { return Ok(()) };
        let program = program.try_clone()?;
        // The thread takes none, either.
        SigSet::all().thread_block()?;
        std::thread::Builder::new()
            .spawn(move || sysfs::keep(&tree, &self.devices, program.as_fd()))
            .map(drop)
    }
}

/// The part of this process in a guardian's start.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum Part {
    /// It starts the guardian.
    #[default]
    Start,
    /// It is the guardian.
    Be,
    /// It is the guardian of those that have connected: of one process of another user than the
    /// program's, or of the processes that an agent hands on.
    BeForOne,
}

/// Starts a guardian of this process, and of the program that it becomes. Returns the value of
/// [`GUARDIAN_VARIABLE`](rocinante_netdev::GUARDIAN_VARIABLE). Error: the program would notice: it
/// is the one that gets the children of others. Or there is no process or descriptor left.
pub fn start(tree: &Tree) -> io::Result<String> {
    let gets_orphans = getpid().is_init() || child_subreaper()?.is_some();
    if gets_orphans {
        return Err(io::Error::other(
            "the program is PID 1, or a subreaper, and would get it as a child",
        ));
    }
    let (socket, name) = Guardian::socket()?;
    let program = pidfd_open(getpid(), PidfdFlags::empty())?;
    let status = tree.tell(own(Part::Start)).stdin(socket).stdout(program).status();
    match status {
        // The caller has its children reaped for it.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(name),
        Ok(status) if status.success() => Ok(name),
        Ok(status) => Err(io::Error::other(format!("it ended with {status}"))),
        Err(error) => Err(error),
    }
}

/// This command in a part. It chooses for itself: variables are for the program.
fn own(part: Part) -> Command {
    let path = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let mut command = Command::new(path);
    let word = part.to_possible_value().map(|value| value.get_name().to_owned());
    command.args(["guardian", "--part"]).args(word).current_dir("/").stderr(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("ROCINANTE_") {
            command.env_remove(name);
        }
    }
    // The guardian has no guardian of its own: it registers with no agent.
    command.env(AGENT_VARIABLE, "off");
    command
}

/// Does a part, with the first two descriptors of this process.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let done = match args.part {
        Part::Start => {
            keep_from_children().and_then(|()| args.tree.tell(own(Part::Be)).spawn().map(drop))
        }
        Part::Be => received(io::stdin()).and_then(|socket| {
            let program = received(io::stdout())?;
            // Without room for it the connections of the dead are ended all the same.
            let _ = args.tree.clone().keep(&program);
            guard(&mut Guardian::new(socket, program))
        }),
        Part::BeForOne => args
            .user
            .zip(args.group)
            .map_or(Ok(()), |(user, group)| become_user(user, group))
            .and_then(|()| args.seconds.map_or(Ok(()), end_after))
            .and_then(|()| guard(&mut Guardian::of(received(io::stdin())?))),
    };
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Becomes a user without any right, before anything is looked at that comes from that user.
fn become_user(user: u32, group: u32) -> io::Result<()> {
    // Another process of the user cannot make this one do things in the host's name (ptrace(2)).
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setgroups(&[])?;
    setgid(group.into())?;
    setuid(user.into())?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(set_capabilities(None, sets)?)
}

/// Has this process end after a time, whatever its threads do then.
fn end_after(seconds: u32) -> io::Result<()> {
    let end = move || {
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let _ = kill_process(getpid(), Signal::KILL);
    };
    std::thread::Builder::new().spawn(end).map(drop)
}

fn received(stream: impl AsFd) -> io::Result<OwnedFd> {
    stream.as_fd().try_clone_to_owned()
}

fn guard(guardian: &mut Guardian) -> io::Result<()> {
    // A signal to the program's group, terminal or session must not end it: it has to end last.
    let _ = setsid();
    SigSet::all().thread_block()?;
    let mut children: Vec<Child> = Vec::new();
    let said = Once::new();
    let too_many = || said.call_once(|| say_too_many(LOG.as_ref()));
    std::thread::scope(|scope| {
        while let Some(errand) = guardian.errand()? {
            children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
            match errand {
                Errand::Settle(left) => {
                    let deadline = Instant::now() + PATIENCE;
                    for it in left {
                        let it = Arc::new(it);
                        let settle = move |it: &Left| {
                            it.settle(deadline, || end_connections(it, deadline));
                        };
                        let own = Arc::clone(&it);
                        let builder = std::thread::Builder::new();
                        if builder.spawn_scoped(scope, move || settle(&own)).is_err() {
                            settle(&it);
                        }
                    }
                }
                Errand::OtherUser { connection, uid, gid } => {
                    let has_room = children.len() < OTHER_USERS_MAX;
                    match has_room.then(|| start_for(&connection, uid, gid)) {
                        Some(Ok(child)) => children.push(child),
                        _ => too_many(),
                    }
                    close_elsewhere(connection);
                }
                Errand::TooMany => too_many(),
            }
        }
        Ok(())
    })
}

/// Starts the guardian of a process of another user.
fn start_for(connection: &OwnedFd, uid: u32, gid: u32) -> io::Result<Child> {
    let mut command = own(Part::BeForOne);
    command.args(["--user", &uid.to_string(), "--group", &gid.to_string()]);
    command.stdin(connection.try_clone()?).stdout(Stdio::null()).spawn()
}

/// Says [`TOO_MANY`] to a log, if there is one that has room.
fn say_too_many(log: &Path) {
    let Ok(socket) = UnixDatagram::unbound() else { return };
    let _ = socket.set_nonblocking(true);
    let _ = socket.send_to(TOO_MANY.as_bytes(), log);
}

/// Opens the address as its next process, and waits until the peers have answered.
fn end_connections(place: &Left, deadline: Instant) {
    let mut options = OpenOptions::new().netdev(Backend::Udp).shards(1);
    if let Some(index) = place.interface {
        let all = Interface::all().unwrap_or_default();
        let Some(interface) = all.iter().find(|it| it.index == index) else { return };
        options = options.device(&interface.name);
    }
    let Ok(context) = options.open(place.address) else { return };
    let is_done = || {
        // In this order: notes become connections.
        let is_taken = !place.is_owed();
        is_taken && context.resources().is_some_and(|resources| resources.connections == 0)
    };
    while !is_done() && Instant::now() < deadline {
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_told_in_one_line_and_none_is_no_error() {
        let folder = tempfile::TempDir::new().unwrap();
        let log = folder.path().join("log");
        say_too_many(&log);
        let socket = UnixDatagram::bind(&log).unwrap();
        say_too_many(&log);
        let mut line = [0; 512];
        let bytes = socket.recv(&mut line).unwrap();
        assert!(line.starts_with(b"<28>rocinante guardian: ") && !line[..bytes].contains(&b'\n'));
    }
}
