//! The binary interface of `librdmacm.so.1`: the structures and numbers of `rdma_cma.h` that this
//! crate uses, and the functions.
//!
//! Like that of `libibverbs` it is stable: all symbols but three are of the version node
//! `RDMACM_1.0` of 2006. The code below asserts the layout against offsets that a C compiler
//! printed for rdma-core 44.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};

use super::super::library::library;
use rocinante_abi::{AhAttr, Context, Device, QpAttr, assert_layout};

/// The library's name for the dynamic linker.
pub(crate) const SONAME: &str = "librdmacm.so.1";

library! {
    SONAME;
    fn rdma_create_event_channel() -> *mut EventChannel;
    fn rdma_destroy_event_channel(*mut EventChannel);
    fn rdma_get_cm_event(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    fn rdma_ack_cm_event(*mut CmEvent) -> c_int;
    fn rdma_create_id(*mut EventChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
    fn rdma_create_ep(*mut *mut CmId, *mut AddrInfo, *mut c_void, *mut c_void) -> c_int;
    fn rdma_migrate_id(*mut CmId, *mut EventChannel) -> c_int;
    fn rdma_destroy_id(*mut CmId) -> c_int;
    fn rdma_bind_addr(*mut CmId, *mut SockAddr) -> c_int;
    fn rdma_listen(*mut CmId, c_int) -> c_int;
    fn rdma_resolve_addr(*mut CmId, *mut SockAddr, *mut SockAddr, c_int) -> c_int;
    fn rdma_resolve_route(*mut CmId, c_int) -> c_int;
    fn rdma_set_option(*mut CmId, c_int, c_int, *mut c_void, usize) -> c_int;
    fn rdma_connect(*mut CmId, *mut ConnParam) -> c_int;
    fn rdma_accept(*mut CmId, *mut ConnParam) -> c_int;
    fn rdma_reject(*mut CmId, *const c_void, u8) -> c_int;
    fn rdma_establish(*mut CmId) -> c_int;
    fn rdma_disconnect(*mut CmId) -> c_int;
    fn rdma_init_qp_attr(*mut CmId, *mut QpAttr, *mut c_int) -> c_int;

    optional:
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct EventChannel {
    pub(super) fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
pub(crate) struct CmId {
    pub(super) verbs: *mut Context,
    _channel: *mut EventChannel,
    pub(super) context: *mut c_void,
    _qp: *mut c_void,
    pub(super) src_addr: Storage,
    pub(super) dst_addr: Storage,
    _ib_addr: [u64; 5],
    _path_rec: *mut c_void,
    _num_paths: [c_int; 2],
    _ps: c_int,
    pub(super) port_num: u8,
    _between: [*mut c_void; 7],
    pub(super) qp_type: c_int,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConnParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// `struct rdma_ud_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UdParam {
    _private_data: *const c_void,
    _private_data_len: u8,
    _ah_attr: AhAttr,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
}

/// The union in `struct rdma_cm_event`. Both members begin with private data and its length.
#[repr(C)]
pub(super) union Param {
    pub(super) conn: ConnParam,
    pub(super) ud: UdParam,
}

/// `struct rdma_cm_event`.
#[repr(C)]
pub(super) struct CmEvent {
    pub(super) id: *mut CmId,
    pub(super) listen_id: *mut CmId,
    pub(super) event: c_int,
    pub(super) status: c_int,
    pub(super) param: Param,
}

/// `struct rdma_addrinfo`.
#[repr(C)]
pub(super) struct AddrInfo {
    pub(super) flags: c_int,
    pub(super) family: c_int,
    pub(super) qp_type: c_int,
    pub(super) port_space: c_int,
    pub(super) src_len: u32,
    pub(super) dst_len: u32,
    pub(super) src_addr: *mut SockAddr,
    pub(super) dst_addr: *mut SockAddr,
    pub(super) canonnames: [*mut c_char; 2],
    pub(super) route_len: usize,
    pub(super) route: *mut c_void,
    pub(super) connect_len: usize,
    pub(super) connect: *mut c_void,
    pub(super) next: *mut AddrInfo,
}

/// `RAI_PASSIVE`.
pub(super) const RAI_PASSIVE: c_int = 1;

/// `enum rdma_port_space`.
pub(super) mod port_space {
    use std::ffi::c_int;

    pub(in super::super) const TCP: c_int = 0x0106;
    pub(in super::super) const UDP: c_int = 0x0111;
    pub(in super::super) const IB: c_int = 0x013f;
}

/// `RDMA_OPTION_ID`.
pub(super) const OPTION_ID: c_int = 0;
/// `RDMA_OPTION_ID_TOS`.
pub(crate) const OPTION_ID_TOS: c_int = 0;
/// `RDMA_OPTION_ID_ACK_TIMEOUT`.
pub(crate) const OPTION_ID_ACK_TIMEOUT: c_int = 3;

/// `RDMA_OPTION_IB`.
pub(super) const OPTION_IB: c_int = 1;
/// `RDMA_OPTION_IB_PATH`.
pub(super) const OPTION_IB_PATH: c_int = 1;

/// `struct ibv_path_data` with its `struct ibv_path_record`, a packed path record of the subnet
/// administration.
#[repr(C, align(8))]
pub(super) struct PathData(pub(super) [u8; 72]);

impl PathData {
    /// Primary, for management and both directions: `IBV_PATH_FLAG_GMP`, `PRIMARY` and
    /// `BIDIRECTIONAL`.
    const FLAGS: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;
    /// The selector "exactly", in the upper two bits of path MTU, rate and lifetime.
    const EXACTLY: u8 = 2 << 6;

    /// ```text
    ///  0..4   flags             8..16 service id        16..32 DGID           32..48 SGID
    /// 48..52  LIDs             52..56 flow label(20) hop limit(8)
    /// 56      traffic class    57     reversible(1) number of paths(7)       58..60 P_Key
    /// 60..62  service level    62     path MTU   63     rate   64     packet lifetime
    /// ```
    pub(super) fn new(path: &super::Path) -> Self {
        let mut b = [0; 72];
        b[..4].copy_from_slice(&Self::FLAGS.to_ne_bytes());
        b[16..32].copy_from_slice(&path.remote);
        b[32..48].copy_from_slice(&path.local);
        b[55] = path.hop_limit;
        b[56] = path.traffic_class;
        b[57] = 1 << 7 | 1;
        b[58..60].copy_from_slice(&[0xff, 0xff]);
        b[62] = Self::EXACTLY | u8::try_from(path.mtu).unwrap_or(0);
        // The port's rate.
        b[63] = Self::EXACTLY;
        b[64] = Self::EXACTLY | path.lifetime & 31;
        Self(b)
    }
}

/// `enum rdma_cm_event_type`.
pub(crate) mod event {
    use std::ffi::c_int;

    pub(crate) const ADDR_RESOLVED: c_int = 0;
    pub(crate) const ADDR_ERROR: c_int = 1;
    pub(crate) const ROUTE_RESOLVED: c_int = 2;
    pub(crate) const ROUTE_ERROR: c_int = 3;
    pub(crate) const CONNECT_REQUEST: c_int = 4;
    pub(crate) const CONNECT_RESPONSE: c_int = 5;
    pub(crate) const CONNECT_ERROR: c_int = 6;
    pub(crate) const UNREACHABLE: c_int = 7;
    pub(crate) const REJECTED: c_int = 8;
    pub(crate) const ESTABLISHED: c_int = 9;
    pub(crate) const DISCONNECTED: c_int = 10;
    pub(crate) const DEVICE_REMOVAL: c_int = 11;
}

/// `struct sockaddr_storage`.
pub(super) type Storage = [u64; 16];

/// `struct sockaddr_in` or `struct sockaddr_in6`, with room for either.
#[repr(C, align(8))]
pub(crate) struct SockAddr {
    bytes: [u8; 32],
}

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

impl SockAddr {
    pub(super) fn new(address: SocketAddr) -> Self {
        let mut bytes = [0; 32];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address {
            SocketAddr::V4(v4) => {
                bytes[..2].copy_from_slice(&AF_INET.to_ne_bytes());
                bytes[4..8].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                bytes[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        Self { bytes }
    }

    /// The length for its family, in bytes.
    pub(super) fn len(&self) -> u32 {
        if self.bytes[..2] == AF_INET.to_ne_bytes() { 16 } else { 28 }
    }
}

/// The address of an identifier or of its peer; `None` for other families.
pub(super) fn address(storage: &Storage) -> Option<SocketAddr> {
    let mut bytes = [0; 32];
    for (part, word) in bytes.chunks_exact_mut(8).zip(storage) {
        part.copy_from_slice(&word.to_ne_bytes());
    }
    let array = |at: usize| -> [u8; 4] { [0, 1, 2, 3].map(|index| bytes[at + index]) };
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match u16::from_ne_bytes([bytes[0], bytes[1]]) {
        AF_INET => Some(SocketAddrV4::new(array(4).into(), port).into()),
        AF_INET6 => {
            let mut ip = [0; 16];
            ip.copy_from_slice(&bytes[8..24]);
            let scope = u32::from_ne_bytes(array(24));
            match IpAddr::from(ip).to_canonical() {
                IpAddr::V6(ip) => Some(SocketAddrV6::new(ip, port, 0, scope).into()),
                ip @ IpAddr::V4(_) => Some(SocketAddr::new(ip, port)),
            }
        }
        _ => None,
    }
}

/// `struct ibv_device`, up to its name.
#[repr(C)]
pub(super) struct DeviceHead {
    _ops: [*mut c_void; 2],
    _types: [c_int; 2],
    pub(super) name: [c_char; 64],
}

/// The head of an open device.
pub(super) fn head(device: *mut Device) -> *const DeviceHead {
    device.cast()
}

#[cfg(target_pointer_width = "64")]
assert_layout! {
    EventChannel 4 { fd 0 }
    CmId 416 { verbs 0 context 16 src_addr 32 dst_addr 160 port_num 348 qp_type 408 }
    ConnParam 24 {
        private_data_len 8 responder_resources 9 initiator_depth 10 flow_control 11 retry_count 12 rnr_retry_count 13 srq 14 qp_num 16
    }
    UdParam 56 { _private_data_len 8 _ah_attr 16 qp_num 48 qkey 52 }
    CmEvent 80 { id 0 listen_id 8 event 16 status 20 param 24 }
    AddrInfo 96 { qp_type 8 port_space 12 src_len 16 src_addr 24 dst_addr 32 route_len 56 connect_len 72 next 88 }
    DeviceHead 88 { name 24 }
    PathData 72 {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_system() {
        for text in ["10.1.2.3:7471", "[fd77::2]:65535", "[fe80::1%3]:80"] {
            let given: SocketAddr = text.parse().unwrap();
            let there = SockAddr::new(given);
            let mut storage = [0; 16];
            for (word, part) in storage.iter_mut().zip(there.bytes.chunks_exact(8)) {
                *word = u64::from_ne_bytes(part.try_into().unwrap());
            }
            assert_eq!(address(&storage), Some(given));
            assert_eq!(there.len(), if given.is_ipv4() { 16 } else { 28 });
        }
        assert_eq!(address(&[0; 16]), None);
        // As in `struct sockaddr_in`.
        let bytes = SockAddr::new("10.1.2.3:7471".parse().unwrap()).bytes;
        assert_eq!((&bytes[2..8], &bytes[8..]), (&[0x1d, 0x2f, 10, 1, 2, 3][..], &[0; 24][..]));
    }
}
