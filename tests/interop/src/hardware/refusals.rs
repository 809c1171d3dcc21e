//! Missing or forbidden things inside the guest. Each error must say what to do.

use crate::guest::Guest;
use crate::matrix::Step;

/// Something to break before a device is opened, and the words of the error.
pub struct Refusal {
    pub(super) name: &'static str,
    /// Commands that break it, and commands that mend it.
    spoil: &'static str,
    mend: &'static str,
    /// Arguments of `rocinante-interop open`: the device, the address if it is not the device's,
    /// bytes to register, and the user.
    device: Option<&'static str>,
    address: Option<&'static str>,
    bytes: usize,
    user: u32,
    /// Whether it also listens.
    listen: bool,
    /// Words that the error must contain.
    says: &'static [&'static str],
}

const NOBODY: u32 = 65_534;

const USUAL: Refusal = Refusal {
    name: "",
    spoil: ":",
    mend: ":",
    device: None,
    address: None,
    bytes: 4096,
    user: 0,
    listen: false,
    says: &[],
};

pub(super) static REFUSALS: [Refusal; 9] = [
    Refusal {
        name: "no_library",
        spoil: "for f in $(find /lib /usr/lib -name 'libibverbs.so.1*'); do mv $f $f.away; done",
        mend: "for f in $(find /lib /usr/lib -name 'libibverbs.so.1*.away'); do mv $f ${f%.away}; done",
        says: &["libibverbs.so.1", "apt-get install libibverbs1 ibverbs-providers", "dnf install"],
        ..USUAL
    },
    Refusal {
        name: "no_cm_library",
        spoil: "for f in $(find /lib /usr/lib -name 'librdmacm.so.1*'); do mv $f $f.away; done",
        mend: "for f in $(find /lib /usr/lib -name 'librdmacm.so.1*.away'); do mv $f ${f%.away}; done",
        listen: true,
        says: &["librdmacm.so.1", "apt-get install librdmacm1", "dnf install librdmacm"],
        ..USUAL
    },
    Refusal {
        name: "no_cm_file",
        spoil: "mv /dev/infiniband/rdma_cm /tmp/rdma_cm.away",
        mend: "mv /tmp/rdma_cm.away /dev/infiniband/rdma_cm",
        listen: true,
        says: &[
            "/dev/infiniband/rdma_cm",
            "does not exist",
            "docker run --device",
            "modprobe rdma_ucm",
        ],
        ..USUAL
    },
    Refusal {
        name: "no_provider",
        spoil: "for f in $(find /lib /usr/lib -name 'librxe-rdmav*.so'); do mv $f $f.away; done",
        mend: "for f in $(find /lib /usr/lib -name 'librxe-rdmav*.so.away'); do mv $f ${f%.away}; done",
        says: &["libibverbs does not list it", "ibverbs-providers"],
        ..USUAL
    },
    Refusal {
        name: "no_file",
        spoil: "mkdir /tmp/away && mv /dev/infiniband/uverbs* /tmp/away",
        mend: "mv /tmp/away/* /dev/infiniband && rmdir /tmp/away",
        says: &["/dev/infiniband/uverbs", "does not exist", "docker run --device"],
        ..USUAL
    },
    Refusal {
        name: "no_permission",
        spoil: "chmod 0600 /dev/infiniband/uverbs*",
        mend: "chmod 0666 /dev/infiniband/uverbs*",
        user: NOBODY,
        says: &["Permission denied", "/dev/infiniband/uverbs", "mode 0600", "chmod 0666"],
        ..USUAL
    },
    Refusal {
        name: "locked_memory",
        spoil: "ulimit -l 64",
        user: NOBODY,
        bytes: 1_000_000,
        says: &["ibv_reg_mr", "1000000 bytes more", "the limit is 65536", "ulimit -l unlimited"],
        ..USUAL
    },
    Refusal {
        name: "no_device",
        device: Some("rxe99"),
        says: &["there is no device \"rxe99\"", "RDMA devices: rxe0"],
        ..USUAL
    },
    Refusal {
        name: "no_address",
        address: Some("192.0.2.9"),
        says: &["has not the RoCE v2 address 192.0.2.9", "rxe0 has "],
        ..USUAL
    },
];

impl Refusal {
    pub(super) fn run(&self, guest: &Guest, device: &str, address: &str) -> Step {
        let Self { spoil, mend, bytes, user, .. } = self;
        let listen = if self.listen { "--listen" } else { "" };
        let (device, address) = (self.device.unwrap_or(device), self.address.unwrap_or(address));
        // The memory limit applies to this shell and its children only.
        let script = format!(
            "( {spoil}; /host/rocinante-interop open {device} {address} {bytes} {user} {listen} ); code=$?; {mend}; exit $code"
        );
        let outcome = guest.run(&script, super::PATIENCE).map_err(|error| error.to_string())?;
        if outcome.code == 0 {
            return Err("the device was opened".into());
        }
        let said = outcome.stderr;
        match self.says.iter().find(|part| !said.contains(*part)) {
            None => Ok(()),
            Some(part) => Err(format!("{part:?} is not in {said:?}")),
        }
    }
}
