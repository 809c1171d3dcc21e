//! Which devices there are, and what they say of themselves before they are open.

use rocinante::device::{Interface, Limits};
use rocinante::plain::{
    AHS_MAX, DEVICES_VARIABLE, GROUPS_MAX, MEMBERS_MAX, PDS_MAX, named_interfaces,
};
use rocinante::verbs::Mtu;

use crate::abi::{DeviceAttr, PortAttr};
use crate::convert;
use crate::log::{Level, say};

/// The length of a table of so many GIDs. Its end is empty.
pub(crate) fn gid_table_len(gids: usize) -> usize {
    (gids + 1).next_multiple_of(16)
}

/// A device that a program can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) name: String,
    /// Its place in the list.
    pub(crate) index: u32,
    pub(crate) interface: Interface,
}

/// The devices, in the order of their names.
pub(crate) fn list() -> std::io::Result<Vec<Found>> {
    limited(std::env::var(DEVICES_VARIABLE).ok().as_deref())
}

/// The devices of a list as the variable has it.
pub(crate) fn limited(list: Option<&str>) -> std::io::Result<Vec<Found>> {
    let all = named_interfaces(list)
        .inspect_err(|error| say(Level::Warn, format_args!("the list of devices: {error}")))?;
    let found = (0..).zip(all).map(|(index, named)| Found {
        name: named.name,
        index,
        interface: named.interface,
    });
    Ok(found.collect())
}

impl Found {
    /// The node GUID, in network byte order.
    pub(crate) fn guid(&self) -> [u8; 8] {
        self.interface.guid().to_be_bytes()
    }

    /// The largest path MTU that the link took when it was listed.
    pub(crate) fn mtu(&self) -> Mtu {
        mtu(&self.interface)
    }

    pub(crate) fn attributes(&self) -> DeviceAttr {
        let limits = Limits::default();
        let int = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        let size = |value: usize| i32::try_from(value).unwrap_or(i32::MAX);
        let rd_atom = int(limits.max_qp_rd_atom);
        DeviceAttr {
            fw_ver: convert::text(env!("CARGO_PKG_VERSION")),
            node_guid: self.guid(),
            sys_image_guid: self.guid(),
            max_mr_size: 1 << 47,
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
            max_pd: int(PDS_MAX),
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
            max_ah: int(AHS_MAX),
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

    /// Port 1, as its interface is now, with so many GIDs.
    pub(crate) fn port(&self, gids: usize) -> PortAttr {
        let now = Interface::by_name(&self.interface.name);
        let interface = now.as_ref().unwrap_or(&self.interface);
        let up = now.is_ok() && interface.up;
        let mtu = mtu(interface);
        let (active_width, active_speed) = lanes(interface.link_speed());
        PortAttr {
            // IBV_PORT_ACTIVE, or IBV_PORT_DOWN.
            state: if up { 4 } else { 1 },
            max_mtu: convert::mtu_code(Mtu::Mtu4096),
            active_mtu: convert::mtu_code(mtu),
            gid_tbl_len: i32::try_from(gid_table_len(gids)).unwrap_or(i32::MAX),
            // IBV_PORT_CM_SUP, IBV_PORT_IP_BASED_GIDS.
            port_cap_flags: 1 << 16 | 1 << 26,
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

/// The width of a port and the speed of a lane, for a link of so many Mb/s: the least that carry
/// it. Without a speed, as on loopback, it is one lane of the slowest, as the kernel says of
/// Soft-RoCE.
fn lanes(link_speed: Option<u32>) -> (u8, u8) {
    /// `IBV_WIDTH_1X` and `..._4X`.
    const ONE: u8 = 1;
    const FOUR: u8 = 2;
    // SDR, DDR, FDR10, EDR, HDR, NDR: 2.5, 5, 10, 25, 50 and 100 Gb/s.
    let table = [
        (2_500, ONE, 1),
        (10_000, ONE, 8),
        (20_000, FOUR, 2),
        (25_000, ONE, 32),
        (40_000, FOUR, 8),
        (50_000, ONE, 64),
        (100_000, FOUR, 32),
        (200_000, FOUR, 64),
    ];
    let speed = link_speed.unwrap_or(0);
    let found = table.iter().find(|(carries, ..)| speed <= *carries);
    found.map_or((FOUR, 128), |(_, width, lane)| (*width, *lane))
}

/// `enum ibv_device_cap_flags`.
const CAPABILITIES: u32 = CURR_QP_STATE_MOD
    | SYS_IMAGE_GUID
    | RC_RNR_NAK_GEN
    | SRQ_RESIZE
    | MEM_WINDOW
    | MEM_MGT_EXTENSIONS
    | MEM_WINDOW_TYPE_2B;
const CURR_QP_STATE_MOD: u32 = 1 << 7;
const SYS_IMAGE_GUID: u32 = 1 << 11;
const RC_RNR_NAK_GEN: u32 = 1 << 12;
const SRQ_RESIZE: u32 = 1 << 13;
const MEM_WINDOW: u32 = 1 << 17;
const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
const MEM_WINDOW_TYPE_2B: u32 = 1 << 24;

/// `device_cap_flags_ex`: the above, FLUSH with global visibility and ATOMIC WRITE.
pub(crate) const CAPABILITIES_EX: u64 = CAPABILITIES as u64 | 1 << 38 | 1 << 40;
