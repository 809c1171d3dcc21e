//! A peer is killed (`kill -9`) during a transfer. The survivor learns of it in bounded time, and
//! can connect anew.

use rocinante::device::Backend;
use rocinante_tests::verbs::death;
use rocinante_tests::{need, require, test_name};

macro_rules! deaths {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if death::is_the_peer() {
                return death::be_the_peer(Backend::$backend.into());
            }
            require!(need::backend(Backend::$backend));
            death::survive(Backend::$backend.into(), Some(test_name!()));
        }
    )*};
}

deaths! {
    a_killed_peer_udp: Udp;
    a_killed_peer_packet: Packet;
    a_killed_peer_afxdp: Xdp;
}
