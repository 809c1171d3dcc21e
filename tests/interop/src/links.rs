//! Links of the guest that its `ip` and `tc` cannot make.

use std::convert::Infallible;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoNetkit, LinkAttribute, LinkInfo, LinkMessage, NetkitMode,
};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rocinante_netdev::{Interface, TcxDepartures};

use crate::error::{Error, Result};

/// Has packets depart from an interface one behind the other, `ns_per_byte` for each byte, until
/// the process is killed. Prints a line when it does. Error: there is no such interface, or the
/// kernel refuses the program.
pub fn departures(device: &str, ns_per_byte: u16) -> Result<Infallible> {
    let index = Interface::by_name(device)?.index;
    let _attached = TcxDepartures::attach(index, ns_per_byte)
        .map_err(|error| Error::because(format!("departure times on {device}"), error))?;
    println!("attached");
    loop {
        std::thread::park();
    }
}

/// Makes a pair of netkit devices of mode L2: with Ethernet headers. Error: the kernel's:
/// `EOPNOTSUPP` without netkit (before 6.7), `EEXIST` if a name is taken.
pub fn netkit_l2(name: &str, peer: &str) -> Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut request = request(name, peer);
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)
        .map_err(|error| Error::new(format!("the kernel's answer: {error}")))?;
    match answer.payload {
        NetlinkPayload::Error(refused) if refused.code.is_some() => {
            Err(Error::because(format!("a netkit pair {name} and {peer}"), refused.to_io()))
        }
        NetlinkPayload::Error(_) => Ok(()),
        other => Err(Error::new(format!("the kernel answered {other:?}"))),
    }
}

fn request(name: &str, peer: &str) -> NetlinkMessage<RouteNetlinkMessage> {
    let mut other_end = LinkMessage::default();
    other_end.attributes.push(LinkAttribute::IfName(peer.to_owned()));
    let data = vec![InfoNetkit::Mode(NetkitMode::L2), InfoNetkit::Peer(other_end)];
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Netkit),
            LinkInfo::Data(InfoData::Netkit(data)),
        ]),
    ];
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK;
    let payload = RouteNetlinkMessage::NewLink(link);
    NetlinkMessage::new(header, NetlinkPayload::InnerMessage(payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_of_mode_l2_with_both_names() {
        let mut request = request("one0", "two0");
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        // IFLA_NETKIT_MODE, of eight bytes, is NETKIT_L2.
        assert!(has(&[8, 0, 5, 0, 0, 0, 0, 0]));
        assert!(has(b"one0\0") && has(b"two0\0") && has(b"netkit"));
    }
}
