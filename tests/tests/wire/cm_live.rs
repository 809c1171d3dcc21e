//! Handshakes of two of our devices, as tshark sees them on the wire: all messages that our
//! connection manager sends, with their fields.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rocinante::VerbsError;
use rocinante::cm::{Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante_stack::types::{Pkey, Psn};
use rocinante_stack::wire::cm::{CmMessage, IpHeader, PortSpace, ServiceId, SidrReq};
use rocinante_stack::wire::icrc::{IpFields, Template};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, GSI_QKEY, write_gsi};
use rocinante_tests::harness::{Family, Harness, PATIENCE, Setup};
use rocinante_tests::tshark::{Capture, number};
use rocinante_tests::{need, on_each_backend, require};
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery};

on_each_backend!(ipv4_handshakes_are_what_tshark_knows, ipv6_handshakes_are_what_tshark_knows,);

const PORT: u16 = 7471;
/// No program listens on this port.
const SHUT: u16 = 9;

fn ipv4_handshakes_are_what_tshark_knows(backend: Backend) {
    require!(need::program("tshark"));
    handshakes(&Setup::new(backend));
}

fn ipv6_handshakes_are_what_tshark_knows(backend: Backend) {
    require!(need::program("tshark"));
    handshakes(&Setup::new(backend).family(Family::V6));
}

/// The fields to check, by tshark's names without `infiniband.`.
#[rustfmt::skip]
const FIELDS: [&str; 34] = [
    "bth.opcode", "bth.destqp", "bth.p_key", "deth.q_key", "deth.srcqp",
    "mad.baseversion", "mad.mgmtclass", "mad.classversion", "mad.method", "mad.status", "mad.attributeid", "mad.attributemodifier",
    "cm.req", "cm.req.serviceid", "cm.req.localqpn", "cm.req.startpsn", "cm.req.transpsvctype", "cm.req.pkey", "cm.req.ip_cm.ipv",
    "cm.rep", "cm.rep.remotecommid", "cm.rep.localqpn", "cm.rep.startpsn",
    "cm.rtu.localcommid", "cm.rtu.remotecommid",
    "cm.rej.localcommid", "cm.rej.remotecommid", "cm.rej.msgrej", "cm.rej.reason",
    "cm.dreq.localcommid", "cm.dreq.remotecommid", "cm.req.remoteqpneecn",
    "cm.drsp.localcommid", "cm.drsp.remotecommid",
];
/// Addresses are text.
const ADDRESSES: [&str; 4] =
    ["cm.req.ip_cm.sip4", "cm.req.ip_cm.dip4", "cm.req.ip_cm.sip6", "cm.req.ip_cm.dip6"];

/// A message as tshark shows it.
struct Seen {
    from: IpAddr,
    title: String,
    fields: BTreeMap<&'static str, u64>,
    addresses: Vec<IpAddr>,
}

impl Seen {
    fn read(columns: &[String]) -> Self {
        let from = columns[..2].iter().find_map(|text| text.parse().ok()).unwrap();
        let fields = FIELDS.iter().zip(&columns[3..]);
        let fields = fields.filter_map(|(name, text)| Some((*name, number(text)?))).collect();
        let addresses = columns[3 + FIELDS.len()..].iter();
        let addresses = addresses.filter_map(|text| text.parse().ok()).collect();
        Self { from, title: columns[2].clone(), fields, addresses }
    }

    #[track_caller]
    fn has(&self, name: &str) -> u64 {
        let field = self.fields.get(name);
        *field.unwrap_or_else(|| panic!("{} has no {name}: {:?}", self.title, self.fields))
    }

    fn of(all: &[Self], title: &str) -> Vec<usize> {
        let of = |seen: &Self| seen.title.starts_with(&format!("CM: {title}"));
        (0..all.len()).filter(|index| of(&all[*index])).collect()
    }
}

/// All kinds of handshakes: without a listener, with one that decides late, and with a SIDR_REQ.
fn handshakes(setup: &Setup) {
    let harness = Harness::new(setup);
    let [client, server] = &harness.sides;
    let lab = harness.lab();
    let mut capture = Capture::start(lab.host(), lab.container(0).host_end()).unwrap();
    let params = Params::default().private_data(b"hello");
    let shut = SocketAddr::new(server.address, SHUT);
    let refused =
        client.run(|| rocinante::cm::connect(client.qp().build()?, shut, &params, PATIENCE));
    assert!(matches!(refused, Err(VerbsError::Cm(_))), "{refused:?}");
    let numbers = connect_late(&harness, &params);
    client.run(|| ask(client.address, server.address));
    let seen = all_seen(&mut capture);
    for message in &seen {
        let fixed = [
            ("bth.opcode", 0x64),
            ("bth.destqp", 1),
            ("bth.p_key", 0xffff),
            ("deth.q_key", GSI_QKEY.into()),
            ("deth.srcqp", 1),
            ("mad.baseversion", 1),
            ("mad.mgmtclass", 7),
            ("mad.classversion", 2),
            ("mad.method", 3),
            ("mad.status", 0),
            ("mad.attributemodifier", 0),
        ];
        for (name, value) in fixed {
            assert_eq!(message.has(name), value, "{name} of {}", message.title);
        }
    }
    check_rejection(&seen, client.address, server.address);
    check_connection(&seen, client.address, server.address, numbers);
    for (title, attribute, from) in
        [("ServiceIDResReq ", 0x17, client.address), ("ServiceIDResReqResp", 0x18, server.address)]
    {
        let [index] = Seen::of(&seen, title.trim_end())
            .into_iter()
            .filter(|index| seen[*index].has("mad.attributeid") == attribute)
            .collect::<Vec<_>>()[..]
        else {
            panic!("not one {title}")
        };
        assert_eq!(seen[index].from, from, "{title}");
    }
}

/// Connects and disconnects; the server gets the REQ twice before it decides. Returns the queue
/// pairs' numbers and starting PSNs.
fn connect_late(harness: &Harness, params: &Params) -> [(u64, u64); 2] {
    let address = SocketAddr::new(harness.sides[1].address, PORT);
    let listener = Listener::bind(&harness.sides[1].ctx, address, 4).unwrap();
    harness.both(|at, side| {
        let qp = side.qp().build().unwrap();
        let told = qp.endpoint();
        let connection: Connection = match at {
            0 => rocinante::cm::connect(qp, address, params, PATIENCE).unwrap(),
            _ => {
                let request = listener.request(Some(PATIENCE)).unwrap();
                // Longer than a peer waits before it repeats its REQ.
                let late = Instant::now() + Duration::from_secs(1);
                while Instant::now() < late {
                    side.ctx.progress();
                    std::thread::sleep(Duration::from_millis(5));
                }
                request.accept(qp, params).unwrap().wait(PATIENCE).unwrap()
            }
        };
        if at == 0 {
            connection.disconnect().unwrap();
        }
        connection.wait_disconnected(PATIENCE).unwrap();
        (u64::from(told.qpn.value()), u64::from(told.psn.value()))
    })
}

/// Sends a SIDR_REQ for a port of `RDMA_PS_UDP`. The answer goes to the device, which did not ask.
fn ask(own: IpAddr, server: IpAddr) {
    let socket = UdpSocket::bind(SocketAddr::new(own, 0)).unwrap();
    let header = IpHeader { src: SocketAddr::new(own, PORT), dst: server };
    let service = ServiceId::of_port(PortSpace::Udp, PORT);
    let private = header.bytes();
    let question = SidrReq { request: 77, pkey: Pkey::DEFAULT, service, private: &private };
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(0), &CmMessage::SidrReq(question).emit(5));
    let ip = IpFields::between(own, server).unwrap();
    Template::new(&ip, socket.local_addr().unwrap().port()).seal(&mut packet);
    if own.is_ipv4() {
        // This makes the kernel send packets of an unconnected socket with the IP identification 0,
        // which the ICRC covers.
        sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
    }
    socket.send_to(&packet, SocketAddr::new(server, 4791)).unwrap();
}

/// All captured messages, once the last one is captured.
fn all_seen(capture: &mut Capture) -> Vec<Seen> {
    let fields = FIELDS.iter().chain(&ADDRESSES).map(|name| format!("infiniband.{name}"));
    let fields: Vec<String> = fields.collect();
    let mut names = vec!["ip.src", "ipv6.src", "_ws.col.Info"];
    names.extend(fields.iter().map(String::as_str));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let complete = capture.packets(&names).unwrap_or_default();
        let last = |columns: &Vec<String>| columns[2].contains("ServiceIDResReqResp");
        if complete.iter().any(last) || Instant::now() > deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    capture.stop().unwrap();
    capture.packets(&names).unwrap().iter().map(|columns| Seen::read(columns)).collect()
}

/// The first request and its rejection.
fn check_rejection(seen: &[Seen], client: IpAddr, server: IpAddr) {
    let (req, rej) = (&seen[0], &seen[Seen::of(seen, "ConnectReject")[0]]);
    assert!(req.title.starts_with("CM: ConnectRequest"), "{}", req.title);
    assert_eq!((req.from, rej.from), (client, server));
    assert_eq!(req.has("cm.req.serviceid"), ServiceId::of_port(PortSpace::Tcp, SHUT).0);
    assert_eq!(rej.has("cm.rej.remotecommid"), req.has("cm.req"));
    // The REJ answers a REQ; the reason is that there is no such service.
    assert_eq!((rej.has("cm.rej.msgrej"), rej.has("cm.rej.reason")), (0, 8));
}

/// The connection: each side announces its starting PSN to the other, and the messages carry both
/// sides' numbers.
fn check_connection(
    seen: &[Seen],
    client: IpAddr,
    server: IpAddr,
    [(qpn, psn), (peer_qpn, peer_psn)]: [(u64, u64); 2],
) {
    let one = |title: &str, from: IpAddr| {
        let index = Seen::of(seen, title).into_iter().rev().find(|index| seen[*index].from == from);
        &seen[index.unwrap_or_else(|| panic!("no {title} of {from}"))]
    };
    let (req, rep) = (one("ConnectRequest", client), one("ConnectReply", server));
    assert_eq!(req.has("cm.req.serviceid"), ServiceId::of_port(PortSpace::Tcp, PORT).0);
    assert_eq!((req.has("cm.req.localqpn"), req.has("cm.req.startpsn")), (qpn, psn));
    assert_eq!((req.has("cm.req.transpsvctype"), req.has("cm.req.pkey")), (0, 0xffff));
    assert_eq!(req.has("cm.req.ip_cm.ipv"), if client.is_ipv4() { 4 } else { 6 });
    assert_eq!(req.addresses, [client, server]);
    assert_eq!((rep.has("cm.rep.localqpn"), rep.has("cm.rep.startpsn")), (peer_qpn, peer_psn));
    let (ours, theirs) = (req.has("cm.req"), rep.has("cm.rep"));
    assert_eq!(rep.has("cm.rep.remotecommid"), ours);
    for (title, from, ids, names) in [
        ("ReadyToUse", client, [ours, theirs], ["cm.rtu.localcommid", "cm.rtu.remotecommid"]),
        (
            "DisconnectRequest",
            client,
            [ours, theirs],
            ["cm.dreq.localcommid", "cm.dreq.remotecommid"],
        ),
        (
            "DisconnectReply",
            server,
            [theirs, ours],
            ["cm.drsp.localcommid", "cm.drsp.remotecommid"],
        ),
    ] {
        assert_eq!(names.map(|name| one(title, from).has(name)), ids, "{title}");
    }
    assert_eq!(one("DisconnectRequest", client).has("cm.req.remoteqpneecn"), peer_qpn);
    // tshark decodes no more than the kind of these.
    assert_eq!(one("MsgRcptAck", server).has("mad.attributeid"), 0x11);
}
