//! Where listeners are: one address, all of a family, all. Each is a place of its own, and the most
//! precise one that has a listener gets the message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rocinante_stack::cm::{CmConfig, CmError, CmEvent, Connect, ConnectionManager};
use rocinante_stack::types::Time;
use rocinante_stack::wire::cm::{PortSpace, ServiceId, SidrStatus};

use crate::net::{A, B, SERVICE, ask, config};

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);

fn v4(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn v6(last: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into()
}

const ANY_V4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const ANY_V6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// The places for messages to `dst`, in the order of their precision.
fn places_of(dst: IpAddr) -> [Option<IpAddr>; 3] {
    [Some(dst), Some(if dst.is_ipv4() { ANY_V4 } else { ANY_V6 }), None]
}

fn all() -> [Option<IpAddr>; 5] {
    [Some(v4(2)), Some(v6(2)), Some(ANY_V4), Some(ANY_V6), None]
}

/// The event of a peer's request; `None` without a listener.
fn asked(here: &mut ConnectionManager, nth: u32, dst: IpAddr) -> Option<CmEvent> {
    // Each is another peer.
    let key = [nth.into(), 7];
    let mut there = ConnectionManager::new(CmConfig { key, ..config(A) });
    let remote = if dst.is_ipv4() { v4(100) } else { v6(100) };
    there.connect(Time(0), &Connect { local: remote, remote: dst, ..ask(nth, b"") }).unwrap();
    here.handle_mad(Time(u64::from(nth)), remote, dst, &there.poll_transmit().unwrap().mad);
    here.poll_event()
}

#[test]
fn each_place_has_a_listener_and_the_most_precise_gets_the_request() {
    let mut here = ConnectionManager::new(config(B));
    let mut listeners = Vec::new();
    for place in all() {
        listeners.push((place, here.listen(SERVICE, place, 64).unwrap()));
        assert_eq!(here.listen(SERVICE, place, 64), Err(CmError::InUse), "{place:?}");
    }
    let mut nth = 0x100;
    // Without the most precise one the next gets it; another address of the family has none.
    for dst in [v4(2), v6(2), v4(3), v6(3)] {
        let precise = places_of(dst).into_iter().filter(|place| all().contains(place));
        let mut open = listeners.clone();
        for place in precise {
            nth += 1;
            let at = open.iter().position(|(it, _)| *it == place).unwrap();
            let (_, wanted) = open.remove(at);
            let event = asked(&mut here, nth, dst);
            let Some(CmEvent::Request { listener, .. }) = event else { panic!("{event:?}") };
            assert_eq!(listener, wanted, "{dst} at {place:?}");
            here.unlisten(wanted, |_| true);
        }
        nth += 1;
        assert_eq!(asked(&mut here, nth, dst), None, "{dst}");
        for (place, id) in &mut listeners {
            *id = here.listen(SERVICE, *place, 64).unwrap_or(*id);
        }
    }
}

#[test]
fn datagram_services_have_the_same_places() {
    let mut nth = 0;
    let mut asked = |here: &mut ConnectionManager, dst: IpAddr| {
        // Each is another question.
        nth += 1;
        let mut there = ConnectionManager::new(CmConfig { key: [nth, 7], ..config(A) });
        let from = if dst.is_ipv4() { v4(100) } else { v6(100) };
        there.resolve(Time(0), (from, dst), (UDP, 40_000), b"").unwrap();
        here.handle_mad(Time(1), from, dst, &there.poll_transmit().unwrap().mad);
        here.poll_event()
    };
    for dst in [v4(2), v6(2), v4(3), v6(3)] {
        let mut here = ConnectionManager::new(config(B));
        let listeners = all().map(|place| {
            let id = here.listen_datagrams(UDP, place, 4).unwrap();
            assert_eq!(here.listen_datagrams(UDP, place, 4), Err(CmError::InUse));
            (place, id)
        });
        for place in places_of(dst) {
            let Some((_, wanted)) = listeners.iter().find(|(it, _)| *it == place) else { continue };
            let event = asked(&mut here, dst);
            let Some(CmEvent::Asked { listener, ask, .. }) = event else { panic!("{event:?}") };
            assert_eq!(listener, *wanted, "{dst} at {place:?}");
            here.answer(Time(1), ask, Err(SidrStatus::REJECT), b"").unwrap();
            here.unlisten_datagrams(Time(1), *wanted, |_| false);
        }
        assert_eq!(asked(&mut here, dst), None, "{dst}");
    }
}
