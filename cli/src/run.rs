//! `rocinante run -- PROGRAM`: an RDMA program as it is, on our libibverbs.so.1.
//!
//! It becomes the program (`execve(2)`), so status, signals and terminal are the program's. All
//! that it leaves behind is the environment, and a [guardian] that is no child of the program.

pub mod guardian;
pub mod library;
pub mod links;
mod mount;
mod own;
pub mod program;
mod shrink;
pub mod tree;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use rocinante::OpenOptions;
use rocinante::device::environment::{self, COUNTERS_VARIABLE};
use rocinante::device::{Backend, FAULT_LOG_VARIABLE, FAULT_VARIABLE, NETDEV_VARIABLE};
use rocinante_netdev::sysfs::PATHS_VARIABLE;
use rocinante_netdev::{DEVICES_VARIABLE, GUARDIAN_VARIABLE, Interface, NamedInterface};

use crate::{devices, session};
use library::Libraries;

/// The exit status of a program that is there and cannot be run, as env(1) and shells have it.
const CANNOT_RUN: u8 = 126;
/// The exit status of a program that is not there.
const NOT_FOUND: u8 = 127;

/// Run an unmodified RDMA program on a device in software
///
/// The program gets Rocinante's libibverbs.so.1 in the place of the system's, and finds a device
/// roce0, roce1 and so on for each network interface with an address; that of the default route is
/// the first. The RDMA devices of the machine are hidden from it.
///
/// Exit status: the program's; 126 if it cannot be run in this way, 127 if it is not there, 2 if
/// the command line makes no sense.
#[derive(Debug, clap::Args)]
#[command(override_usage = "rocinante run [OPTIONS] -- PROGRAM [ARGS]...")]
pub struct Args {
    /// The backend: udp, packet, afxdp or auto
    #[arg(long, value_parser = netdev)]
    netdev: Option<String>,
    /// Only this interface; NAME=DEVICE gives the device another name, such as mlx5_0. Several
    /// are separated by commas
    #[arg(long, value_name = "NAME[=DEVICE]", value_delimiter = ',')]
    device: Vec<String>,
    /// Let the program's datagrams and devices meet faults, such as
    /// loss=2%,reorder=1%,delay=100us,seed=7, or those of a schedule in a .toml file
    #[arg(long, value_name = "FAULTS", value_parser = session::fault)]
    fault: Option<String>,
    /// Append a line of JSON to this file for each datagram or call that met a fault
    #[arg(long, value_name = "FILE")]
    fault_log: Option<PathBuf>,
    /// Run the program again and again, and print the smallest part of the faults with which it
    /// still fails, as a schedule; each try ends after SECONDS (60)
    #[arg(long, value_name = "SECONDS", value_parser = seconds, num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "60", requires = "fault")]
    #[arg(conflicts_with_all = ["fault_log", "counters"])]
    shrink: Option<Duration>,
    /// Say on stderr which devices there are, on which backend and why
    #[arg(short, long)]
    verbose: bool,
    /// Print the counters of the program's devices when it exits
    #[arg(long)]
    counters: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Why there is no program that this process became, and its exit status.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    status: u8,
    why: String,
}

impl Refusal {
    fn cannot(why: impl Into<String>) -> Self {
        Self { status: CANNOT_RUN, why: why.into() }
    }
}

/// Becomes the program, or says why not.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    if let Some(limit) = args.shrink {
        return shrink::shrink(args, limit);
    }
    let refusal = become_program(args);
    eprintln!("rocinante run: {}", refusal.why);
    ExitCode::from(refusal.status)
}

fn become_program(args: &Args) -> Refusal {
    prepare(args).map_or_else(
        |refusal| refusal,
        |(mut command, tree)| {
            // Last, so that a refused program gets no guardian.
            match guardian::start(&tree) {
                Ok(name) => drop(command.env(GUARDIAN_VARIABLE, name)),
                Err(why) => {
                    // Another program's would not know when this one ends.
                    command.env_remove(GUARDIAN_VARIABLE);
                    if args.verbose {
                        say(&format!("no guardian, so peers wait if the program is killed: {why}"));
                    }
                }
            }
            let error = command.exec();
            Refusal::cannot(format!("{}: {error}", command.get_program().display()))
        },
    )
}

/// The program with its environment, and the directory that a guardian keeps for it.
fn prepare(args: &Args) -> Result<(Command, guardian::Tree), Refusal> {
    let named = args.program.split_first().filter(|(name, _)| !name.is_empty());
    let (name, rest) = named.ok_or_else(|| Refusal::cannot("no program is named"))?;
    // The library would fail at each device, and programs do not show why.
    let options = OpenOptions::new();
    let options = if args.netdev.is_some() { options.netdev_auto() } else { options };
    let options = if args.fault.is_some() { options.fault("off") } else { options };
    let counters = || if args.counters { Ok(true) } else { environment::wants_counters() };
    let settled = options.check_environment().and_then(|()| environment::log());
    let settled = settled.and_then(|_| counters());
    settled.map_err(|error| Refusal::cannot(error.to_string()))?;
    let path = program::find(name)?;
    let libraries = Libraries::find().map_err(Refusal::cannot)?;
    let blind = program::blindness(&path);
    if blind.is_none() {
        program::check(&path, &libraries)?;
    }
    let list = if args.device.is_empty() {
        std::env::var(DEVICES_VARIABLE).unwrap_or_default()
    } else {
        args.device.join(",")
    };
    let made = tree::make(&list).map_err(|error| {
        // Its words say what to do where a sandbox forbids netlink.
        let why = Interface::all().map_or_else(|why| why.to_string(), |_| error.to_string());
        Refusal::cannot(why)
    });
    let (devices, root) = match made {
        // The library finds no device either, and the program may do without.
        Err(refusal) if list.is_empty() => {
            say(&format!("no device: {}", refusal.why));
            (Vec::new(), Err(io::ErrorKind::NotFound.into()))
        }
        made => made?,
    };
    // Below another `run` these are no machine's.
    let machine = match std::env::var_os(PATHS_VARIABLE) {
        None => machine_devices(Path::new("/sys/class/infiniband")),
        Some(_) => Vec::new(),
    };
    let mounted = root.as_ref().map(|root| mount::over(root));
    let is_mounted = matches!(mounted, Ok(Ok(())));
    match blind {
        None => {}
        Some(why) if is_mounted => say(&format!(
            "{why}: it finds the devices below /sys/class/infiniband, and cannot use them"
        )),
        Some(_) => program::check(&path, &libraries)?,
    }

    let mut command = Command::new(&path);
    // Some programs are several, and choose by their name.
    command.arg0(name).args(rest).envs(libraries.environment());
    if let Ok(root) = &root {
        command.env(PATHS_VARIABLE, root);
    }
    if let Some(netdev) = &args.netdev {
        command.env(NETDEV_VARIABLE, netdev);
    }
    if !args.device.is_empty() {
        command.env(DEVICES_VARIABLE, &list);
    }
    // The program may change its working directory.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
    if let Some(fault) = &args.fault {
        let is_file = fault.ends_with(".toml");
        let fault = if is_file { absolute(Path::new(fault)).into() } else { fault.into() };
        command.env::<_, OsString>(FAULT_VARIABLE, fault);
    }
    if let Some(log) = &args.fault_log {
        command.env(FAULT_LOG_VARIABLE, absolute(log));
        if session::faults_of(args.fault.as_deref()).is_none() {
            say(session::NOTHING_TO_LOG);
        }
    }
    if args.counters {
        command.env(COUNTERS_VARIABLE, "1");
    }
    if args.verbose {
        explain(args, &libraries, &devices);
        if !machine.is_empty() {
            let list = machine.join(", ");
            say(&format!("hidden: this machine's own RDMA devices: {list}"));
        }
        match (&root, mounted) {
            (Ok(root), Ok(Ok(()))) => {
                say(&format!("/sys/class/infiniband is {}, mounted", root.display()));
            }
            (Ok(root), Ok(Err(error))) => say(&format!(
                "/sys/class/infiniband is {}; it cannot be mounted ({error}), so programs in Go and \
                 static ones do not see it",
                root.display()
            )),
            (Err(error), _) | (_, Err(error)) => {
                say(&format!("/sys/class/infiniband is not answered: {error}"));
            }
        }
        if libraries.paths.is_none() {
            say("there is no librocinante_paths.so: paths are not answered, but by a mount");
        }
    }
    let tree = root.ok().filter(|_| is_mounted);
    Ok((command, guardian::Tree { tree, devices: list }))
}

/// Facts for a user whose program does not find its device.
fn explain(args: &Args, libraries: &Libraries, devices: &[NamedInterface]) {
    say(&format!("libibverbs.so.1 is {}", libraries.verbs.display()));
    let word = args.netdev.clone().or_else(|| std::env::var(NETDEV_VARIABLE).ok());
    let word = word.unwrap_or_default();
    for NamedInterface { name, interface, .. } in devices {
        let (backend, reason, _) = devices::backend(interface, &word);
        let addresses: Vec<String> =
            interface.addresses.iter().map(|(address, _)| address.to_string()).collect();
        say(&format!(
            "device {name}: {} ({}), backend {}: {reason}",
            interface.name,
            addresses.join(", "),
            backend.map_or("none", Backend::name)
        ));
    }
    if devices.is_empty() {
        say("no device: no interface has an address");
    }
}

/// The RDMA devices that the kernel has.
fn machine_devices(class: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(class).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn say(text: &str) {
    eprintln!("rocinante run: {text}");
}

fn seconds(word: &str) -> Result<Duration, String> {
    let seconds = word.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let seconds = seconds.filter(|seconds| (0.001..1e6).contains(&seconds.as_secs_f64()));
    seconds.ok_or_else(|| "give it seconds, from 0.001 to a million".to_owned())
}

fn netdev(word: &str) -> Result<String, String> {
    if word != "auto" {
        word.parse::<Backend>().map_err(|why| format!("{why}, or auto"))?;
    }
    Ok(word.to_owned())
}
