//! The devices of this machine, and their attributes before they are open.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rocinante_netdev::Interface;
use rocinante_netdev::handed::page::{Amounts, NO_LIMIT, RESOURCES};
use rocinante_soft::least;
use rocinante_soft::model::device::Limits;
use rocinante_soft::model::error::VerbsError;
use rocinante_stack::types::Mtu;

use crate::abi::cap;
use crate::abi::{DeviceAttr, PortAttr};
use crate::convert;
use crate::log::{self, Level, say};
use crate::plain::sysfs::Devices;
use crate::plain::{
    AHS_MAX, DEVICES_VARIABLE, GROUPS_MAX, MEMBERS_MAX, NamedInterface, OfProcess, PDS_MAX,
    gid_table_len, named_interfaces,
};

/// A device that a program can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) name: String,
    /// Its number, which stays.
    pub(crate) index: u32,
    pub(crate) interface: Interface,
    /// Its GIDs by their indices, when it was listed.
    pub(crate) gids: Vec<Option<IpAddr>>,
}

/// The names that programs know. Without `rocinante run` they are of this process alone, and its
/// children.
static DEVICES: OfProcess<Mutex<Devices>> = OfProcess::none();
/// How long a thread waits for another one that lists.
const PATIENCE: Duration = Duration::from_millis(500);

fn devices() -> &'static Mutex<Devices> {
    DEVICES.get_or(|parents| {
        Mutex::new(parents.and_then(inherited).unwrap_or_else(Devices::of_environment))
    })
}

/// What a parent had, in a child of fork(2): nothing, if a thread of the parent was about to change
/// it.
pub(crate) fn inherited<T: Clone>(parents: &Mutex<T>) -> Option<T> {
    let held = parents.try_lock()?;
    let copy = held.clone();
    // To give it back might wake a thread that is not here.
    std::mem::forget(held);
    Some(copy)
}

fn of_environment() -> String {
    std::env::var(DEVICES_VARIABLE).unwrap_or_default()
}

/// The devices, in the order of their numbers.
pub(crate) fn list() -> std::io::Result<Vec<Found>> {
    let list = of_environment();
    match devices().try_lock_for(PATIENCE) {
        Some(mut devices) => found(devices.list(Some(&list))),
        None => found(Devices::of_environment().list(Some(&list))),
    }
}

/// The devices of a list as the variable has it, named for this call.
pub(crate) fn limited(list: Option<&str>) -> std::io::Result<Vec<Found>> {
    found(named_interfaces(list))
}

fn found(devices: std::io::Result<Vec<NamedInterface>>) -> std::io::Result<Vec<Found>> {
    let devices = devices.inspect_err(|error| match error.raw_os_error() {
        // A sandbox without netlink, or a shortage, is no fault of the user's list.
        Some(_) => say(Level::Warn, format_args!("the list of devices: {error}")),
        None => log::refuse("the list of devices", error, libc::EINVAL),
    })?;
    let found = devices.into_iter().map(|device| Found {
        name: device.name,
        index: device.number,
        interface: device.interface,
        gids: device.gids,
    });
    Ok(found.collect())
}

/// The directory that all processes of one `rocinante run` share.
pub(crate) fn directory() -> Option<PathBuf> {
    devices().try_lock_for(PATIENCE)?.root().map(Path::to_owned)
}

/// The program is about to read in the tree of files: brings it up to date, unless that was done a
/// moment ago.
pub(crate) fn show(counters: bool) {
    /// Less than it takes to change an interface from another process.
    const FRESH: Duration = Duration::from_millis(1);
    static LAST: OfProcess<[Mutex<Option<Instant>>; 2]> = OfProcess::none();
    // A thread that comes meanwhile waits for the result.
    let last = &LAST.get()[usize::from(counters)];
    let Some(mut last) = last.try_lock_for(PATIENCE) else { return };
    if last.is_some_and(|last| last.elapsed() < FRESH) {
        return;
    }
    let list = of_environment();
    if let Some(mut devices) = devices().try_lock_for(PATIENCE) {
        let _ = match counters {
            true => devices.count(Some(&list)),
            false => devices.list(Some(&list)).map(drop),
        };
    }
    *last = Some(Instant::now());
}

impl Found {
    /// Says why it cannot be opened. Returns the errno.
    pub(crate) fn refused(&self, error: &VerbsError) -> i32 {
        let errno = error.errno();
        log::refuse(format_args!("{} ({})", self.name, self.interface.name), error, errno);
        errno
    }

    /// The node GUID, in network byte order.
    pub(crate) fn guid(&self) -> [u8; 8] {
        self.interface.guid().to_be_bytes()
    }

    /// The largest path MTU that the link took when it was listed.
    pub(crate) fn mtu(&self) -> Mtu {
        mtu(&self.interface)
    }

    pub(crate) fn attributes(&self) -> DeviceAttr {
        self.attributes_within(&[NO_LIMIT; RESOURCES.len()])
    }

    /// The attributes of a device of a container with these limits.
    pub(crate) fn attributes_within(&self, quota: &Amounts) -> DeviceAttr {
        let limits = least(Limits::default(), quota);
        let objects = u32::try_from(quota[1]).unwrap_or(u32::MAX);
        let int = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        let size = |value: usize| i32::try_from(value).unwrap_or(i32::MAX);
        let rd_atom = int(limits.max_qp_rd_atom);
        DeviceAttr {
            fw_ver: convert::text(env!("CARGO_PKG_VERSION")),
            node_guid: self.guid(),
            sys_image_guid: self.guid(),
            max_mr_size: quota[2].min(1 << 47),
            page_size_cap: 0xffff_f000,
            // No vendor: as Soft-RoCE says.
            vendor_id: 0xff_ffff,
            vendor_part_id: 0,
            hw_ver: 0,
            max_qp: int(limits.max_qp),
            max_qp_wr: int(limits.max_qp_wr),
            device_cap_flags: CAPABILITIES,
            max_sge: int(limits.max_sge),
            max_sge_rd: int(limits.max_sge),
            max_cq: int(limits.max_cq),
            max_cqe: int(limits.max_cqe),
            max_mr: int(limits.max_mr),
            max_pd: int(objects.min(PDS_MAX)),
            max_qp_rd_atom: rd_atom,
            max_ee_rd_atom: 0,
            max_res_rd_atom: rd_atom.saturating_mul(int(limits.max_qp)),
            max_qp_init_rd_atom: rd_atom,
            max_ee_init_rd_atom: 0,
            // IBV_ATOMIC_HCA: against each other.
            atomic_cap: 1,
            max_ee: 0,
            max_rdd: 0,
            max_mw: int(limits.max_mr),
            max_raw_ipv6_qp: 0,
            max_raw_ethy_qp: 0,
            max_mcast_grp: size(GROUPS_MAX),
            max_mcast_qp_attach: size(MEMBERS_MAX),
            max_total_mcast_qp_attach: size(GROUPS_MAX * MEMBERS_MAX),
            max_ah: int(objects.min(AHS_MAX)),
            max_fmr: 0,
            max_map_per_fmr: 0,
            max_srq: int(limits.max_srq),
            max_srq_wr: int(limits.max_srq_wr),
            max_srq_sge: int(limits.max_srq_sge),
            max_pkeys: 1,
            local_ca_ack_delay: 15,
            phys_port_cnt: 1,
        }
    }

    /// Its interface as it is now. Another one of the same name is another device.
    pub(crate) fn now(&self) -> Option<Interface> {
        let all = Interface::all().unwrap_or_default();
        all.into_iter().find(|interface| interface.index == self.interface.index)
    }

    /// Port 1, as its interface is now, with this number of GIDs; `is_down` by a fault.
    pub(crate) fn port(&self, gids: usize, is_down: bool) -> PortAttr {
        let now = self.now();
        let interface = now.as_ref().unwrap_or(&self.interface);
        let up = now.is_some() && interface.up && !is_down;
        let mtu = mtu(interface);
        let (active_width, active_speed) = interface.lanes();
        PortAttr {
            // IBV_PORT_ACTIVE, or IBV_PORT_DOWN.
            state: if up { 4 } else { 1 },
            max_mtu: convert::mtu_code(Mtu::Mtu4096),
            active_mtu: convert::mtu_code(mtu),
            gid_tbl_len: i32::try_from(gid_table_len(gids)).unwrap_or(i32::MAX),
            port_cap_flags: Interface::PORT_CAPABILITIES,
            max_msg_sz: 1 << 31,
            pkey_tbl_len: 1,
            max_vl_num: 1,
            active_width,
            active_speed,
            // LinkUp, or Disabled.
            phys_state: if up { 5 } else { 3 },
            // IBV_LINK_LAYER_ETHERNET, and IBV_QPF_GRH_REQUIRED.
            link_layer: 2,
            flags: 1,
            ..PortAttr::default()
        }
    }
}

fn mtu(interface: &Interface) -> Mtu {
    Mtu::for_link(interface.mtu).unwrap_or(Mtu::Mtu256)
}

/// `enum ibv_device_cap_flags`.
const CAPABILITIES: u32 = CURR_QP_STATE_MOD
    | SYS_IMAGE_GUID
    | RC_RNR_NAK_GEN
    | SRQ_RESIZE
    | cap::MEM_WINDOW
    | MEM_MGT_EXTENSIONS
    | cap::MEM_WINDOW_TYPE_2B;
const CURR_QP_STATE_MOD: u32 = 1 << 7;
const SYS_IMAGE_GUID: u32 = 1 << 11;
const RC_RNR_NAK_GEN: u32 = 1 << 12;
const SRQ_RESIZE: u32 = 1 << 13;
const MEM_MGT_EXTENSIONS: u32 = 1 << 21;

/// `device_cap_flags_ex`: the above, FLUSH with global visibility and ATOMIC WRITE.
pub(crate) const CAPABILITIES_EX: u64 = CAPABILITIES as u64 | 1 << 38 | 1 << 40;
