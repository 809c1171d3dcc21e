//! Every operation between two containers: on every backend, over IPv4 and IPv6, at three path
//! MTUs, at sizes around packet borders. All bytes are compared, also those around the target.

use rocinante::device::Backend;
use rocinante::verbs::Mtu;
use rocinante_tests::harness::{Family, Setup};
use rocinante_tests::verbs::operations::run;
use rocinante_tests::{need, require};

/// One test per cell, and the list of their names.
macro_rules! cells {
    ($( $name:ident: $backend:ident $family:ident $mtu:ident; )*) => {
        $(
            #[test]
            fn $name() {
                require!(need::backend(Backend::$backend));
                run(&Setup::new(Backend::$backend).family(Family::$family).mtu(Mtu::$mtu));
            }
        )*

        const CELLS: &[(&str, Backend, Family, Mtu)] =
            &[$( (stringify!($name), Backend::$backend, Family::$family, Mtu::$mtu), )*];
    };
}

cells! {
    udp_ipv4_256: Udp V4 Mtu256;
    udp_ipv4_1024: Udp V4 Mtu1024;
    udp_ipv4_4096: Udp V4 Mtu4096;
    udp_ipv6_256: Udp V6 Mtu256;
    udp_ipv6_1024: Udp V6 Mtu1024;
    udp_ipv6_4096: Udp V6 Mtu4096;
    packet_ipv4_256: Packet V4 Mtu256;
    packet_ipv4_1024: Packet V4 Mtu1024;
    packet_ipv4_4096: Packet V4 Mtu4096;
    packet_ipv6_256: Packet V6 Mtu256;
    packet_ipv6_1024: Packet V6 Mtu1024;
    packet_ipv6_4096: Packet V6 Mtu4096;
    afxdp_ipv4_256: Xdp V4 Mtu256;
    afxdp_ipv4_1024: Xdp V4 Mtu1024;
    afxdp_ipv4_4096: Xdp V4 Mtu4096;
    afxdp_ipv6_256: Xdp V6 Mtu256;
    afxdp_ipv6_1024: Xdp V6 Mtu1024;
    afxdp_ipv6_4096: Xdp V6 Mtu4096;
}

#[test]
fn no_cell_is_missing() {
    let mut expected = Vec::new();
    for backend in [Backend::Udp, Backend::Packet, Backend::Xdp] {
        for family in [Family::V4, Family::V6] {
            for mtu in [Mtu::Mtu256, Mtu::Mtu1024, Mtu::Mtu4096] {
                expected.push((backend, family, mtu));
            }
        }
    }
    let cells: Vec<_> =
        CELLS.iter().map(|&(_, backend, family, mtu)| (backend, family, mtu)).collect();
    assert_eq!(cells, expected);
    assert_eq!(CELLS.len(), 18);
    for (name, backend, family, mtu) in CELLS {
        let family = if *family == Family::V4 { "ipv4" } else { "ipv6" };
        assert_eq!(*name, format!("{backend}_{family}_{mtu}"));
    }
}
