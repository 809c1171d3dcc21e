//! Errors of the system's RDMA stack, and the remedies.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rocinante_netdev::Interface;
use rocinante_soft::model::error::{HardwareError, VerbsError};
use rocinante_soft::model::qp::QpCaps;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::ffi;
use super::sysfs::{self, HardwareDevice};

/// The library cannot be loaded.
pub(super) fn no_library(why: &str) -> VerbsError {
    HardwareError::refused(
        format!(
            "RDMA devices of the kernel are used through {}, which cannot be loaded",
            ffi::SONAME
        ),
        io::Error::new(io::ErrorKind::NotFound, why.to_owned()),
        "install it: `apt-get install libibverbs1 ibverbs-providers` (Debian, Ubuntu), `dnf install libibverbs` (Fedora, RHEL), \
         `apk add rdma-core` (Alpine; a statically linked program cannot load libraries at all)",
    )
}

/// The library of the connection manager cannot be loaded.
pub(super) fn no_cm_library(why: &str) -> VerbsError {
    HardwareError::refused(
        format!(
            "queue pairs of the kernel's devices are connected through {}, which cannot be loaded",
            ffi::rdmacm::SONAME
        ),
        io::Error::new(io::ErrorKind::NotFound, why.to_owned()),
        "install it: `apt-get install librdmacm1` (Debian, Ubuntu), `dnf install librdmacm` (Fedora, RHEL), `apk add rdma-core` (Alpine)",
    )
}

/// The kernel's connection manager cannot be opened.
pub(super) fn no_cm(error: io::Error) -> VerbsError {
    let problem = problem_with(Path::new("/dev/infiniband/rdma_cm"), "rdma_ucm");
    let (error, advice) = problem.unwrap_or((error, String::new()));
    HardwareError::refused("cannot open the kernel's connection manager", error, advice)
}

/// An address of the device cannot be used with the connection manager.
pub(super) fn cannot_bind(address: SocketAddr, error: io::Error) -> VerbsError {
    let advice = match address.ip() {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            "it is an address of a link only: use another of the device's (`rocinante devices`)"
        }
        _ => "has the device's interface this address still (`ip address`)?",
    };
    HardwareError::refused(format!("the kernel's connection manager at {address}"), error, advice)
}

/// The kernel's connection manager takes another device for the address.
pub(super) fn another_device(
    (name, port): &(String, u8),
    address: IpAddr,
    other: Option<(String, u8)>,
) -> VerbsError {
    let other = other.map_or("none".to_owned(), |(name, port)| format!("{name}, port {port}"));
    HardwareError::refused(
        format!(
            "the kernel's connection manager takes another device than {name}, port {port}, for {address}: {other}"
        ),
        Errno::NODEV,
        "give the devices different addresses, or open that one",
    )
}

/// The kernel finds no path to a peer.
pub(super) fn no_way(error: io::Error) -> VerbsError {
    VerbsError::Path(error)
}

pub(super) fn no_device(name: &str) -> VerbsError {
    let interfaces: Vec<String> =
        Interface::all().unwrap_or_default().into_iter().map(|interface| interface.name).collect();
    let advice = no_device_advice(&sysfs::hardware_devices(), &interfaces);
    HardwareError::refused(format!("there is no device {name:?}"), Errno::NODEV, advice)
}

fn no_device_advice(devices: &[HardwareDevice], interfaces: &[String]) -> String {
    let software =
        format!("network interfaces, for the device in software: {}", interfaces.join(", "));
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    if names.is_empty() {
        return format!(
            "the kernel shows no RDMA device in this network namespace (`rdma link`; `rdma link add rxe0 type rxe netdev eth0` makes \
             one in software); {software}"
        );
    }
    format!("RDMA devices: {}; {software}", names.join(", "))
}

/// The kernel has the device, but the library does not list it.
pub(super) fn not_listed(device: &HardwareDevice) -> VerbsError {
    let advice = match &device.file {
        None => {
            "load the kernel module that serves it to programs: `modprobe ib_uverbs`".to_owned()
        }
        Some(file) => file_problem(file).map(|(_, advice)| advice).unwrap_or_else(|| "its library of user space is missing: install `ibverbs-providers` (Debian, Ubuntu) or `rdma-core` (others)".to_owned()),
    };
    HardwareError::refused(
        format!("the kernel has the RDMA device {}, but libibverbs does not list it", device.name),
        Errno::NODEV,
        advice,
    )
}

/// The library cannot list the devices.
pub(super) fn cannot_list(error: io::Error) -> VerbsError {
    HardwareError::refused(
        "libibverbs cannot list the RDMA devices",
        error,
        "is the kernel module ib_uverbs loaded (`modprobe ib_uverbs`), and is /sys mounted?",
    )
}

pub(super) fn cannot_open(device: &HardwareDevice, error: io::Error) -> VerbsError {
    // The library tries several ways, and reports the error of the last one.
    let (error, advice) = match device.file.as_deref().and_then(file_problem) {
        Some((problem, advice)) => (problem, advice),
        None => (error, String::new()),
    };
    HardwareError::refused(format!("cannot open the RDMA device {}", device.name), error, advice)
}

/// The problem with a device's file, and the remedy.
fn file_problem(file: &Path) -> Option<(io::Error, String)> {
    problem_with(file, "ib_uverbs")
}

/// The problem with a file that a kernel module serves, and the remedy.
fn problem_with(file: &Path, module: &str) -> Option<(io::Error, String)> {
    let error = fs::OpenOptions::new().read(true).write(true).open(file).err()?;
    let shown = file.display();
    let advice = match (error.kind(), fs::metadata(file)) {
        (io::ErrorKind::PermissionDenied, Ok(meta)) => format!(
            "no permission to read and write {shown} (mode {:04o}, owner {}:{}): `chmod 0666 {shown}` as root, as the udev rule of \
             rdma-core does; or join its group; in a container `docker run --device {shown} …`",
            meta.permissions().mode() & 0o777,
            meta.uid(),
            meta.gid(),
        ),
        (io::ErrorKind::NotFound, _) => format!(
            "its file {shown} does not exist: in a container pass it in (`docker run --device {shown} …`), else `modprobe {module}`"
        ),
        _ => format!(
            "that is what opening {shown} says: in a container pass it in by `docker run --device {shown} …`"
        ),
    };
    Some((error, advice))
}

/// A port that cannot carry RoCE v2, or is not up.
pub(super) fn bad_port(device: &HardwareDevice, wanted: Option<u8>) -> VerbsError {
    let ports: Vec<String> = device
        .ports
        .iter()
        .map(|port| {
            let (number, gids) = (port.number, port.gids.len());
            format!(
                "port {number} is {}, {}, with {gids} RoCE v2 addresses",
                port.link_layer, port.state
            )
        })
        .collect();
    let what = match wanted {
        Some(number) => format!("port {number} of {} cannot be used", device.name),
        None => format!("no port of {} can be used", device.name),
    };
    HardwareError::refused(
        what,
        Errno::NODEV,
        format!(
            "{}: it takes an active Ethernet port whose interface is up and has an address (`rdma link`, `ip address`)",
            ports.join("; ")
        ),
    )
}

/// No device has the address, or the requested one does not have it.
pub(super) fn no_address(
    name: Option<&str>,
    devices: &[HardwareDevice],
    address: IpAddr,
) -> VerbsError {
    let devices = devices.iter().filter(|device| name.is_none_or(|name| device.name == name));
    let known: Vec<String> = devices
        .map(|device| {
            let gids = device.ports.iter().flat_map(|port| &port.gids);
            let gids: Vec<String> = gids.map(|gid| gid.address.to_string()).collect();
            format!("{} has {}", device.name, gids.join(", "))
        })
        .collect();
    let what = match name {
        Some(name) => format!("{name} has not the RoCE v2 address {address}"),
        None => format!("no RDMA device has the RoCE v2 address {address}"),
    };
    HardwareError::refused(
        what,
        Errno::ADDRNOTAVAIL,
        format!(
            "{}: give one of these, or `ip address add` it to the device's interface",
            known.join("; ")
        ),
    )
}

/// A call of the library failed.
pub(super) fn failed(call: &str, error: io::Error) -> VerbsError {
    HardwareError::refused(call, error, "")
}

/// A queue pair of that size cannot be made.
pub(super) fn refused_caps(caps: &QpCaps, error: io::Error) -> VerbsError {
    let QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } = caps;
    HardwareError::refused(
        format!(
            "ibv_create_qp (send {max_send_wr} of {max_send_sge} elements, receive {max_recv_wr} of {max_recv_sge}, inline {max_inline_data})"
        ),
        error,
        "ask for less: `rocinante devices` shows the limits, but for inline data, of which a device may take none",
    )
}

/// Creation of an object that needs locked memory failed; `bytes` is the amount if it is known.
pub(super) fn locked(call: &str, bytes: Option<u64>, error: io::Error) -> VerbsError {
    if error.raw_os_error() != Some(Errno::NOMEM.raw_os_error()) {
        return failed(call, error);
    }
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let advice = memlock_advice(bytes, getrlimit(Resource::Memlock).current, &status);
    HardwareError::refused(call, error, advice)
}

/// The remedy if memory cannot be locked; `status` is `/proc/self/status`.
fn memlock_advice(bytes: Option<u64>, limit: Option<u64>, status: &str) -> String {
    const CAP_IPC_LOCK: u32 = 14;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()
    };
    let unbound = field("CapEff:")
        .and_then(|bits| u64::from_str_radix(bits, 16).ok())
        .is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1);
    let Some(limit) = limit.filter(|_| !unbound) else {
        return "the device or the kernel has no memory for it: fewer or smaller regions and queues".to_owned();
    };
    let pinned = field("VmPin:").and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024;
    let needed =
        bytes.map_or_else(String::new, |bytes| format!("this needs {bytes} bytes more of it, "));
    format!(
        "memory for an RDMA device is locked: {needed}{pinned} bytes are locked already, and the limit is {limit} (`ulimit -l` shows KiB): \
         raise it by `ulimit -l unlimited` as root before the program starts, `* - memlock unlimited` in /etc/security/limits.conf, \
         LimitMEMLOCK=infinity in a unit of systemd, or `docker run --ulimit memlock=-1 …`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_names_those_that_exist() {
        let interfaces = ["lo".to_owned(), "eth0".to_owned()];
        let none = no_device_advice(&[], &interfaces);
        assert!(none.contains("rdma link add") && none.contains("lo, eth0"), "{none}");
        let rxe = HardwareDevice { name: "rxe7".into(), file: None, ports: Vec::new() };
        let some = no_device_advice(&[rxe], &interfaces);
        assert!(some.starts_with("RDMA devices: rxe7; ") && some.contains("eth0"), "{some}");
    }

    #[test]
    fn a_device_that_the_library_does_not_list_says_what_is_missing() {
        let mut device = HardwareDevice { name: "rxe7".into(), file: None, ports: Vec::new() };
        assert!(not_listed(&device).to_string().contains("modprobe ib_uverbs"));
        device.file = Some("/dev/infiniband/uverbs-none".into());
        assert!(not_listed(&device).to_string().contains("docker run --device"));
        device.file = Some("/dev/null".into());
        assert!(not_listed(&device).to_string().contains("ibverbs-providers"));
    }

    #[test]
    fn a_file_that_is_missing_or_closed_says_so() {
        let (error, advice) = file_problem(Path::new("/dev/infiniband/uverbs-none")).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(advice.contains("--device /dev/infiniband/uverbs-none"), "{advice}");
        assert!(file_problem(Path::new("/dev/null")).is_none());
    }

    #[test]
    fn a_limit_of_locked_memory_is_named_unless_it_does_not_bind() {
        let bound = "CapEff:\t0000000000000000\nVmPin:\t      12 kB\n";
        let advice = memlock_advice(Some(4096), Some(65_536), bound);
        for part in [
            "4096 bytes more",
            "12288 bytes are locked",
            "the limit is 65536",
            "ulimit -l unlimited",
        ] {
            assert!(advice.contains(part), "{part}: {advice}");
        }
        let free = "CapEff:\t000001ffffffffff\n";
        assert!(!memlock_advice(Some(1), Some(65_536), free).contains("ulimit"));
        assert!(!memlock_advice(Some(1), None, bound).contains("ulimit"));
    }

    #[test]
    fn other_errors_are_not_blamed_on_the_limit() {
        let error = locked("ibv_reg_mr", Some(1), Errno::INVAL.into());
        assert_eq!(error.errno(), Errno::INVAL.raw_os_error());
        assert!(!error.to_string().contains("ulimit"), "{error}");
    }
}
