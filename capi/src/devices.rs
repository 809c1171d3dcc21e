//! Which devices there are, and what they say of themselves before they are open.

use std::net::IpAddr;

use rocinante::device::{Interface, Limits};
use rocinante::plain::{DEVICES_VARIABLE, named_interfaces};
use rocinante::verbs::Mtu;

use crate::abi::{DeviceAttr, PortAttr};
use crate::convert;
use crate::log::{Level, say};

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
    let limits = std::env::var(DEVICES_VARIABLE).ok();
    let all = named_interfaces(limits.as_deref())
        .inspect_err(|error| say(Level::Warn, format_args!("the list of devices: {error}")))?;
    let found = (0..).zip(all).map(|(index, named)| Found {
        name: named.name,
        index,
        interface: named.interface,
    });
    Ok(found.collect())
}

impl Found {
    /// The GID table, IPv4 first and link-local last.
    pub(crate) fn gids(&self) -> impl ExactSizeIterator<Item = IpAddr> + '_ {
        self.interface.addresses.iter().map(|(address, _)| *address)
    }

    /// The GID at `index`.
    pub(crate) fn gid(&self, index: usize) -> Option<IpAddr> {
        self.gids().nth(index)
    }

    /// The length of the GID table. Its end is empty.
    pub(crate) fn gid_table_len(&self) -> usize {
        (self.gids().len() + 1).next_multiple_of(16)
    }

    /// The node GUID, in network byte order.
    pub(crate) fn guid(&self) -> [u8; 8] {
        self.interface.guid().to_be_bytes()
    }

    pub(crate) fn attributes(&self) -> DeviceAttr {
        let limits = Limits::default();
        let int = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        let mut fw_ver = [0; 64];
        for (to, from) in fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
            *to = from.cast_signed();
        }
        let rd_atom = int(limits.max_qp_rd_atom);
        DeviceAttr {
            fw_ver,
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
            max_pd: 1 << 16,
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
            max_mcast_grp: 64,
            max_mcast_qp_attach: 64,
            max_total_mcast_qp_attach: 4096,
            max_ah: 1 << 16,
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

    /// Port 1, as its interface is now.
    pub(crate) fn port(&self) -> PortAttr {
        let now = Interface::by_name(&self.interface.name);
        let interface = now.as_ref().unwrap_or(&self.interface);
        let up = now.is_ok() && interface.up;
        let mtu = Mtu::for_link(interface.mtu).unwrap_or(Mtu::Mtu256);
        PortAttr {
            // IBV_PORT_ACTIVE, or IBV_PORT_DOWN.
            state: if up { 4 } else { 1 },
            max_mtu: convert::mtu_code(Mtu::Mtu4096),
            active_mtu: convert::mtu_code(mtu),
            gid_tbl_len: i32::try_from(self.gid_table_len()).unwrap_or(i32::MAX),
            // IBV_PORT_CM_SUP, IBV_PORT_IP_BASED_GIDS.
            port_cap_flags: 1 << 16 | 1 << 26,
            max_msg_sz: 1 << 30,
            pkey_tbl_len: 1,
            max_vl_num: 1,
            // One lane of 10 Gb/s, as veth says of itself.
            active_width: 1,
            active_speed: 4,
            // LinkUp, or Disabled.
            phys_state: if up { 5 } else { 3 },
            // IBV_LINK_LAYER_ETHERNET, and IBV_QPF_GRH_REQUIRED.
            link_layer: 2,
            flags: 1,
            ..PortAttr::default()
        }
    }
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
