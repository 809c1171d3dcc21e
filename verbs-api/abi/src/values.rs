//! Our values and their numbers in `verbs.h`, both ways.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr};

use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{QpState, QpType, WcOpcode};

macro_rules! numbers {
    ($(
        $(#[$doc:meta])*
        $to:ident, $from:ident: $type:ident { $($value:ident = $number:literal,)* $(_ = $other:literal)? }
    )*) => { $(
        $(#[$doc])*
        #[inline]
        #[must_use]
        pub fn $to(value: $type) -> c_int {
            match value {
                $($type::$value => $number,)*
                $(_ => $other,)?
            }
        }

        $(#[$doc])*
        ///
        /// `None` for a number that none of our values has.
        #[inline]
        #[must_use]
        pub fn $from(number: c_int) -> Option<$type> {
            match number {
                $($number => Some($type::$value),)*
                _ => None,
            }
        }
    )* };
}

numbers! {
    /// `enum ibv_qp_state`.
    qp_state_number, qp_state: QpState {
        Reset = 0, Init = 1, Rtr = 2, Rts = 3, Sqd = 4, Sqe = 5, Err = 6,
    }
    /// `enum ibv_qp_type`.
    qp_type_number, qp_type: QpType { Rc = 2, Uc = 3, Ud = 4, }
    /// `enum ibv_mtu`.
    mtu_number, mtu: Mtu { Mtu256 = 1, Mtu512 = 2, Mtu1024 = 3, Mtu2048 = 4, Mtu4096 = 5, }
    /// `enum ibv_wc_opcode`.
    wc_opcode_number, wc_opcode: WcOpcode {
        Send = 0, RdmaWrite = 1, RdmaRead = 2, CompSwap = 3, FetchAdd = 4, BindMw = 5, LocalInv = 6,
        Flush = 8, AtomicWrite = 9, Recv = 128, RecvRdmaWithImm = 129, _ = 0
    }
}

/// The GID of an address. An IPv4 address has its IPv4-mapped GID.
#[must_use]
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address of a GID.
#[must_use]
pub fn address(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}
