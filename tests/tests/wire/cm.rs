//! The messages of the connection manager: as Linux sent them, as tshark reads ours, and as a
//! hostile peer may send them.

use std::net::Ipv4Addr;
use std::process::Command;

use etherparse::PacketBuilder;
use proptest::prelude::*;
use rocinante_stack::cm::{Accept, CmConfig, CmEvent, ConnectionManager, QpSide};
use rocinante_stack::types::{Mtu, Pkey, Psn, Qpn, QueueKind, Time};
use rocinante_stack::wire::cm::{
    Announced, Apr, CmMessage, CmPath, CommId, Drep, Dreq, Gid, IpHeader, Lap, Mra, PortSpace, Rej,
    RejReason, Rep, Req, Rtu, ServiceId, SidrRep, SidrReq, SidrStatus, Subject, Transport,
};
use rocinante_stack::wire::icrc::{IpFields, Template};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, GSI_QKEY, MAD_LEN, write_gsi};
use rocinante_stack::wire::{Opcode, Packet};
use rocinante_tests::captures::{self, Captured};
use rocinante_tests::tshark::number;
use rocinante_tests::{need, require};

use super::witnesses::capture;

fn captured() -> Vec<Captured> {
    let to_gsi = |captured: &Captured| {
        Packet::parse(&captured.bytes).is_ok_and(|packet| packet.bth().dest_qpn == Qpn::GSI)
    };
    captures::all().into_iter().filter(to_gsi).collect()
}

#[test]
fn what_linux_sent_is_read_and_written_byte_for_byte() {
    let mut kinds = [0; 16];
    for captured in captured() {
        let packet = Packet::parse(&captured.bytes).unwrap();
        let deth = packet.deth().unwrap();
        assert_eq!((packet.bth().opcode, deth.qkey), (Opcode::UD_SEND_ONLY, GSI_QKEY));
        assert_eq!((deth.src_qpn, captured.bytes.len()), (Qpn::GSI, GSI_PACKET_LEN));
        let (header, message) = CmMessage::parse(packet.payload()).unwrap();
        kinds[usize::from(message.attribute() - 0x10)] += 1;
        let emitted = message.emit(header.tid);
        assert_eq!(emitted, packet.payload(), "{} #{}", captured.file, captured.number);
        let mut whole = [0; GSI_PACKET_LEN];
        write_gsi(&mut whole, packet.bth().psn, &emitted);
        // Linux' MigReq and AckReq bits differ, and so does the ICRC.
        assert_eq!(whole[2..8], captured.bytes[2..8]);
        assert_eq!(whole[9..GSI_PACKET_LEN - 4], captured.bytes[9..GSI_PACKET_LEN - 4]);
    }
    // REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP.
    assert_eq!(kinds[..9], [3, 0, 1, 2, 2, 2, 2, 1, 1]);
}

#[test]
fn what_linux_meant_is_what_tshark_shows_of_it() {
    let all = captured();
    let of = |file: &str, index: usize| {
        let captured = all.iter().filter(|captured| captured.file == file).nth(index).unwrap();
        Packet::parse(&captured.bytes).unwrap().payload()
    };
    let bytes = of("cm_rping_ipv4", 0);
    let Ok((header, CmMessage::Req(req))) = CmMessage::parse(bytes) else { panic!("no REQ") };
    assert_eq!(header.tid, 0x0000_0002_4490_01ae);
    assert_eq!(req.local, CommId(0xae01_9044));
    assert_eq!(req.service, ServiceId::of_port(PortSpace::Tcp, 7174));
    assert_eq!((req.qpn, req.psn), (Qpn::new(0x31), Psn::new(0x26_09d1)));
    assert_eq!((req.responder_resources, req.initiator_depth), (1, 1));
    assert_eq!((req.remote_response_timeout, req.local_response_timeout), (20, 20));
    assert_eq!((req.retry_count, req.rnr_retry, req.max_cm_retries), (7, 7, 15));
    assert_eq!((req.transport, req.mtu, req.pkey), (Transport::Rc, 3, Pkey::DEFAULT));
    assert_eq!(req.primary.local_gid.address(), Ipv4Addr::new(10, 77, 0, 2));
    assert_eq!((req.primary.flow_label, req.primary.rate), (0x3_2fbc, 0));
    // Linux: source port · 31 + destination port.
    assert_eq!(req.primary.flow_label, (40330 * 31 + 7174) & 0xf_ffff);
    assert_eq!((req.primary.hop_limit, req.primary.ack_timeout), (64, 17));
    assert_eq!((req.alternate, req.announced), (CmPath::default(), None));
    let (ip, user) = IpHeader::parse(req.private).unwrap();
    assert_eq!(ip.src, "10.77.0.2:40330".parse().unwrap());
    assert_eq!((ip.dst, user), (Ipv4Addr::new(10, 77, 0, 3).into(), &[0; 56][..]));

    let Ok((_, CmMessage::Rep(rep))) = CmMessage::parse(of("cm_rping_ipv4", 1)) else { panic!() };
    assert_eq!((rep.remote, rep.qpn), (req.local, Qpn::new(0x30)));
    assert_eq!((rep.psn, rep.target_ack_delay, rep.rnr_retry), (Psn::new(0x83_78d3), 15, 7));

    let Ok((_, CmMessage::Req(req))) = CmMessage::parse(of("cm_rping_ipv6", 0)) else { panic!() };
    let (ip, _) = IpHeader::parse(req.private).unwrap();
    assert_eq!(ip.dst.to_string(), "fd77::3");

    let bytes = of("cm_reject_no_listener", 1);
    let Ok((_, CmMessage::Rej(rej))) = CmMessage::parse(bytes) else { panic!() };
    // Linux: 28 from the port space of rdma_cm, where the module listens on all ports.
    assert!([RejReason::INVALID_SERVICE_ID, RejReason::CONSUMER].contains(&rej.reason));
    assert_eq!(rej.subject, Subject::Req);

    let Ok((_, CmMessage::SidrReq(ask))) = CmMessage::parse(of("cm_udaddy_sidr", 0)) else {
        panic!()
    };
    let Ok((_, CmMessage::SidrRep(told))) = CmMessage::parse(of("cm_udaddy_sidr", 1)) else {
        panic!()
    };
    assert_eq!(ask.service.port().map(|(space, _)| space), Some(PortSpace::Udp));
    assert_eq!((ask.request, told.status), (told.request, SidrStatus::SUCCESS));
    assert_eq!(ask.service, told.service);
}

fn path(seed: u32) -> CmPath {
    let wide = [seed; 4].map(|word| word.rotate_left(7).to_be_bytes());
    let gid = |first: u8| {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(wide.as_flattened());
        bytes[0] = first;
        Gid(bytes)
    };
    CmPath {
        local_lid: CmPath::PERMISSIVE_LID,
        remote_lid: seed as u16,
        local_gid: gid(0xfd),
        remote_gid: gid(0x20),
        flow_label: seed & 0xf_ffff,
        rate: (seed >> 3) as u8 & 0x3f,
        traffic_class: (seed >> 5) as u8,
        hop_limit: (seed >> 9) as u8,
        service_level: (seed >> 13) as u8 & 15,
        subnet_local: seed & 1 == 1,
        ack_timeout: (seed >> 17) as u8 & 31,
    }
}

fn req(seed: u32, private: &[u8]) -> Req<'_> {
    Req {
        local: CommId(seed),
        service: ServiceId(u64::from(seed) << 32 | u64::from(!seed)),
        ca_guid: u64::from(seed) * 0x1_0000_0001,
        announced: None,
        qkey: seed.rotate_left(3),
        qpn: Qpn::new(seed.rotate_left(9)),
        responder_resources: (seed >> 1) as u8,
        initiator_depth: (seed >> 2) as u8,
        remote_response_timeout: (seed >> 3) as u8 & 31,
        transport: [Transport::Rc, Transport::Uc, Transport::Rd, Transport::Extended]
            [seed as usize & 3],
        flow_control: seed & 4 != 0,
        psn: Psn::new(seed.rotate_left(11)),
        local_response_timeout: (seed >> 8) as u8 & 31,
        retry_count: (seed >> 4) as u8 & 7,
        pkey: Pkey(seed as u16),
        mtu: (seed >> 6) as u8 & 15,
        rdc_exists: seed & 8 != 0,
        rnr_retry: (seed >> 7) as u8 & 7,
        max_cm_retries: (seed >> 9) as u8 & 15,
        srq: seed & 16 != 0,
        extended_transport: (seed >> 10) as u8 & 7,
        primary: path(seed),
        alternate: path(!seed),
        private,
    }
}

fn rep(seed: u32, private: &[u8]) -> Rep<'_> {
    Rep {
        local: CommId(seed),
        remote: CommId(!seed),
        qkey: seed.rotate_left(3),
        qpn: Qpn::new(seed.rotate_left(9)),
        announced: None,
        psn: Psn::new(seed.rotate_left(11)),
        responder_resources: (seed >> 1) as u8,
        initiator_depth: (seed >> 2) as u8,
        target_ack_delay: (seed >> 3) as u8 & 31,
        failover: (seed >> 4) as u8 & 3,
        flow_control: seed & 4 != 0,
        rnr_retry: (seed >> 5) as u8 & 7,
        srq: seed & 8 != 0,
        ca_guid: u64::from(seed) * 0x1_0000_0001,
        private,
    }
}

/// One message of each kind.
fn messages(seed: u32, private: &[u8]) -> [CmMessage<'_>; 11] {
    let (local, remote) = (CommId(seed), CommId(seed.rotate_left(16) | 1));
    let (remote_qpn, service) = (Qpn::new(!seed), ServiceId::of_port(PortSpace::Udp, seed as u16));
    let subject = [Subject::Req, Subject::Rep, Subject::Other][seed as usize % 3];
    let reason = RejReason(seed as u16 % 36);
    let info = &private[..private.len().min(seed as usize % 73)];
    let status = SidrStatus(seed as u8 % 6);
    let (request, qpn, qkey) = (seed, Qpn::new(seed), !seed);
    let service_timeout = seed as u8 & 31;
    [
        CmMessage::Req(req(seed, private)),
        CmMessage::Mra(Mra { local, remote, subject, service_timeout, private }),
        CmMessage::Rej(Rej { local, remote, subject, reason, info, private }),
        CmMessage::Rep(rep(seed, private)),
        CmMessage::Rtu(Rtu { local, remote, private }),
        CmMessage::Dreq(Dreq { local, remote, remote_qpn, private }),
        CmMessage::Drep(Drep { local, remote, private }),
        CmMessage::SidrReq(SidrReq { request, pkey: Pkey(seed as u16), service, private }),
        CmMessage::SidrRep(SidrRep { request, status, qpn, service, qkey, info, private }),
        CmMessage::Lap(Lap { local, remote, remote_qpn }),
        CmMessage::Apr(Apr { local, remote, status: seed as u8 }),
    ]
}

/// The sender's bytes come back, followed by zeros.
fn same_private(sent: &[u8], read: &[u8]) -> bool {
    let len = sent.len().min(read.len());
    read[..len] == sent[..len] && read[len..].iter().all(|byte| *byte == 0)
}

/// The private data, and the message without it.
fn apart<'a>(message: &CmMessage<'a>) -> (CmMessage<'a>, Option<&'a [u8]>) {
    let mut bare = *message;
    let private = match &mut bare {
        CmMessage::Req(Req { private, .. })
        | CmMessage::Mra(Mra { private, .. })
        | CmMessage::Rej(Rej { private, .. })
        | CmMessage::Rep(Rep { private, .. })
        | CmMessage::Rtu(Rtu { private, .. })
        | CmMessage::Dreq(Dreq { private, .. })
        | CmMessage::Drep(Drep { private, .. })
        | CmMessage::SidrReq(SidrReq { private, .. })
        | CmMessage::SidrRep(SidrRep { private, .. }) => Some(std::mem::take(private)),
        CmMessage::Lap(_) | CmMessage::Apr(_) => None,
    };
    (bare, private)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_survive_their_bytes(seed: u32, tid: u64, private in prop::collection::vec(any::<u8>(), 0..250)) {
        for message in messages(seed, &private) {
            let bytes = message.emit(tid);
            let (header, read) = CmMessage::parse(&bytes).unwrap();
            prop_assert_eq!(header.tid, tid);
            let ((sent, filled), (read, full)) = (apart(&message), apart(&read));
            prop_assert_eq!(sent, read);
            prop_assert!(same_private(filled.unwrap_or(&[]), full.unwrap_or(&[])));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), MAD_LEN), attribute in 0x0eu8..0x1d, header: bool, cut in 0..=MAD_LEN) {
        if header {
            bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
            bytes[16..18].copy_from_slice(&[0, attribute]);
        }
        let _ = CmMessage::parse(&bytes[..cut]);
        if let Ok((header, message)) = CmMessage::parse(&bytes) {
            let again = message.emit(header.tid);
            let (_, read) = CmMessage::parse(&again).unwrap();
            prop_assert_eq!(read, message);
            if let CmMessage::Req(Req { private, .. }) | CmMessage::SidrReq(SidrReq { private, .. }) = message
                && let Ok((header, _)) = IpHeader::parse(private)
            {
                prop_assert_eq!(IpHeader::parse(&header.bytes()).unwrap().0, header);
            }
        }
    }
}

#[test]
fn a_budget_stands_where_other_implementations_do_not_look() {
    let places = Announced {
        bytes: 147_456,
        datagrams: 384,
        queue: Some(QueueKind::Places),
        answers: false,
    };
    let changed = |of: &dyn Fn(Option<Announced>) -> [u8; MAD_LEN], announced| {
        let (with, without) = (of(announced), of(None));
        let differing = (0..MAD_LEN).filter(|at| with[*at] != without[*at]);
        differing.map(|at| (at - 24, with[at])).collect::<Vec<_>>()
    };
    let req_of = |announced| CmMessage::Req(Req { announced, ..req(7, b"x") }).emit(1);
    let rep_of = |announced| CmMessage::Rep(Rep { announced, ..rep(7, b"x") }).emit(1);
    let of: [(usize, &dyn Fn(_) -> _); 2] = [(24, &req_of), (16, &rep_of)];
    for (at, of) in of {
        let [bytes, datagrams] = [(at + 1, 0x79), (at + 2, 0x34)];
        for (queue, last) in [(None, None), (places.queue, Some((at + 3, 2)))] {
            let announced = Some(Announced { queue, ..places });
            let expected = [(at, 0x52), bytes, datagrams].into_iter().chain(last);
            assert_eq!(changed(of, announced), expected.collect::<Vec<_>>());
            assert_eq!(announced_in(&of(announced)), announced);
        }
        // A kind that a later version has.
        let mut later = of(Some(places));
        later[24 + at + 3] = 77;
        assert_eq!(announced_in(&later), Some(Announced { queue: None, ..places }));
    }
}

fn announced_in(bytes: &[u8]) -> Option<Announced> {
    match CmMessage::parse(bytes) {
        Ok((_, CmMessage::Req(req))) => req.announced,
        Ok((_, CmMessage::Rep(rep))) => rep.announced,
        other => panic!("{other:?}"),
    }
}

/// tshark's names of the fields, and their values.
fn shown(message: &CmMessage<'_>) -> Vec<(&'static str, u64)> {
    let id = |id: CommId| u64::from(id.0);
    match message {
        CmMessage::Req(m) => vec![
            ("cm.req.serviceid", m.service.0),
            ("cm.req.localcaguid", m.ca_guid),
            ("cm.req.localqkey", m.qkey.into()),
            ("cm.req.localqpn", m.qpn.value().into()),
            ("cm.req.responderres", m.responder_resources.into()),
            ("cm.req.initdepth", m.initiator_depth.into()),
            ("cm.req.remoteresptout", m.remote_response_timeout.into()),
            ("cm.req.transpsvctype", m.transport as u64),
            ("cm.req.e2eflowctrl", m.flow_control.into()),
            ("cm.req.startpsn", m.psn.value().into()),
            ("cm.req.localresptout", m.local_response_timeout.into()),
            ("cm.req.retrcount", m.retry_count.into()),
            ("cm.req.pkey", m.pkey.0.into()),
            ("cm.req.pppmtu", m.mtu.into()),
            ("cm.req.rdcexist", m.rdc_exists.into()),
            ("cm.req.rnrretrcount", m.rnr_retry.into()),
            ("cm.req.maxcmretr", m.max_cm_retries.into()),
            ("cm.req.srq", m.srq.into()),
            ("cm.req.ext_transport", m.extended_transport.into()),
            ("cm.req.prim_locallid", m.primary.local_lid.into()),
            ("cm.req.prim_remotelid", m.primary.remote_lid.into()),
            // tshark 4.0 reads other bits as flow label and packet rate.
            ("cm.req.prim_tfcclass", m.primary.traffic_class.into()),
            ("cm.req.prim_hoplim", m.primary.hop_limit.into()),
            ("cm.req.prim_sl", m.primary.service_level.into()),
            ("cm.req.prim_subnetlocal", m.primary.subnet_local.into()),
            ("cm.req.prim_localacktout", m.primary.ack_timeout.into()),
        ],
        CmMessage::Rep(m) => vec![
            ("cm.rep.remotecommid", id(m.remote)),
            ("cm.rep.localqkey", m.qkey.into()),
            ("cm.rep.localqpn", m.qpn.value().into()),
            ("cm.rep.startpsn", m.psn.value().into()),
            ("cm.rep.respres", m.responder_resources.into()),
            ("cm.rep.initdepth", m.initiator_depth.into()),
            ("cm.rep.tgtackdelay", m.target_ack_delay.into()),
            ("cm.rep.failoveracc", m.failover.into()),
            ("cm.rep.e2eflowctrl", m.flow_control.into()),
            ("cm.rep.rnrretrcount", m.rnr_retry.into()),
            ("cm.rep.srq", m.srq.into()),
            ("cm.rep.localcaguid", m.ca_guid),
        ],
        CmMessage::Rej(m) => vec![
            ("cm.rej.localcommid", id(m.local)),
            ("cm.rej.remotecommid", id(m.remote)),
            ("cm.rej.msgrej", m.subject as u64),
            ("cm.rej.rejinfolen", m.info.len() as u64),
            ("cm.rej.reason", m.reason.0.into()),
        ],
        CmMessage::Rtu(m) => {
            vec![("cm.rtu.localcommid", id(m.local)), ("cm.rtu.remotecommid", id(m.remote))]
        }
        CmMessage::Dreq(m) => vec![
            ("cm.dreq.localcommid", id(m.local)),
            ("cm.dreq.remotecommid", id(m.remote)),
            ("cm.req.remoteqpneecn", m.remote_qpn.value().into()),
        ],
        CmMessage::Drep(m) => {
            vec![("cm.drsp.localcommid", id(m.local)), ("cm.drsp.remotecommid", id(m.remote))]
        }
        // tshark shows only the header of the others.
        _ => vec![],
    }
}

/// A frame with the message, sealed.
fn frame(mad: &[u8; MAD_LEN]) -> Vec<u8> {
    let (src, dst) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(10, 77, 0, 3));
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(5), mad);
    Template::new(&IpFields::V4 { src, dst, id: 0, flags: 0x4000 }, 0xc001).seal(&mut packet);
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
        .ipv4(src.octets(), dst.octets(), 64)
        .udp(0xc001, 4791)
        .write(&mut frame, &packet)
        .unwrap();
    frame
}

/// tshark's values of these fields for each frame.
fn ask_tshark(frames: &[Vec<u8>], fields: &[&str]) -> Vec<Vec<String>> {
    let capture = capture(frames.iter().map(|frame| &frame[..]));
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&capture).args(["-n", "-T", "fields", "-E", "separator=|"]);
    command.args(["-E", "occurrence=f", "-e", "_ws.col.Info"]);
    for field in fields {
        command.args(["-e", &format!("infiniband.{field}")]);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> =
        text.lines().map(|line| line.split('|').map(str::to_owned).collect()).collect();
    assert_eq!(lines.len(), frames.len(), "{}", String::from_utf8_lossy(&output.stderr));
    lines
}

#[test]
fn tshark_sees_every_field_that_we_wrote() {
    require!(need::program("tshark"));
    let names: Vec<&str> = {
        let mut names = vec!["mad.transactionid", "mad.attributeid", "mad.method", "deth.q_key"];
        names.extend(messages(1, b"").iter().flat_map(shown).map(|(name, _)| name));
        names
    };
    let titles = [
        "ConnectRequest",
        "MsgRcptAck",
        "ConnectReject",
        "ConnectReply",
        "ReadyToUse",
        "DisconnectRequest",
        "DisconnectReply",
        "ServiceIDResReq",
        "ServiceIDResReqResp",
        "LoadAlternatePath",
        "AlternatePathResponse",
    ];
    let seeds = [1u32, 0x1234_5678, 0x9e37_79b9, 0xdead_beef, 0x0fed_cba9];
    let sent: Vec<_> = seeds.iter().flat_map(|seed| messages(*seed, b"private")).collect();
    let frames: Vec<_> = sent.iter().map(|message| frame(&message.emit(0x1_2345_6789))).collect();
    let seen = ask_tshark(&frames, &names);
    for (index, (message, line)) in sent.iter().zip(&seen).enumerate() {
        let title = format!("CM: {}", titles[index % titles.len()]);
        assert!(line[0].starts_with(&title), "{title} is {}", line[0]);
        let column = |wanted: &str| {
            let at = names.iter().position(|name| *name == wanted).unwrap();
            number(&line[at + 1])
        };
        assert_eq!(column("mad.transactionid"), Some(0x1_2345_6789));
        assert_eq!(column("mad.attributeid"), Some(message.attribute().into()));
        assert_eq!((column("mad.method"), column("deth.q_key")), (Some(3), Some(GSI_QKEY.into())));
        for (name, ours) in shown(message) {
            assert_eq!(column(name), Some(ours), "{name} of {message:?}");
        }
    }
}

#[test]
fn tshark_sees_the_addresses_that_we_wrote() {
    require!(need::program("tshark"));
    let names =
        ["cm.req.ip_cm.sip4", "cm.req.ip_cm.dip4", "cm.req.ip_cm.sip6", "cm.req.ip_cm.dip6"];
    let more = ["cm.req.ip_cm.sport", "cm.req.prim_localgid_ipv4"];
    let pairs = [("10.77.0.2:40330", "10.77.0.3"), ("[fd77::2]:40331", "fd77::3")];
    let frames = pairs.map(|(src, dst)| {
        let header = IpHeader { src: src.parse().unwrap(), dst: dst.parse().unwrap() };
        let primary = CmPath {
            local_gid: header.src.ip().into(),
            remote_gid: header.dst.into(),
            ..CmPath::default()
        };
        let service = ServiceId::of_port(PortSpace::Tcp, 7174);
        let private = header.bytes();
        frame(&CmMessage::Req(Req { service, primary, ..req(1, &private) }).emit(1))
    });
    let seen = ask_tshark(&frames, &[&names[..], &more[..]].concat());
    assert_eq!(seen[0][1..7], ["10.77.0.2", "10.77.0.3", "", "", "0x9d8a", "10.77.0.2"]);
    assert_eq!(seen[1][1..6], ["", "", "fd77::2", "fd77::3", "0x9d8b"]);
}

/// Linux' requests, given to a connection manager of ours in place of the peer.
#[test]
fn what_linux_asked_for_is_offered_and_answered() {
    let now = Time(1_000_000_000);
    for (file, peer) in [("cm_rping_ipv4", "10.77.0.2"), ("cm_rping_ipv6", "fd77::2")] {
        let mut cm = ConnectionManager::new(CmConfig::default());
        let all = captured();
        let of_file = || all.iter().filter(|captured| captured.file == file);
        let hear = |cm: &mut ConnectionManager, index: usize| {
            let captured = of_file().nth(index).unwrap();
            let (src, dst) = captured.ip.addresses();
            cm.handle_mad(now, src, dst, Packet::parse(&captured.bytes).unwrap().payload());
        };
        cm.listen(ServiceId::of_port(PortSpace::Tcp, 7174), None, 1).unwrap();
        hear(&mut cm, 0);
        let Some(CmEvent::Request { conn, request, .. }) = cm.poll_event() else { panic!() };
        assert_eq!(request.peer.ip().to_string(), peer);
        assert_eq!((request.mtu, request.transport), (Mtu::Mtu1024, Transport::Rc));
        assert_eq!((request.ack_timeout, request.side.announced), (17, None));
        let announced =
            Some(Announced { bytes: 1 << 20, datagrams: 64, queue: None, answers: false });
        let side = QpSide { announced, ..QpSide::new(Qpn::new(0x77), Psn::new(1)) };
        cm.accept(now, conn, &Accept { side, keep_alive: None, private: b"" }).unwrap();
        let reply = cm.poll_transmit().unwrap();
        let Ok((header, CmMessage::Rep(rep))) = CmMessage::parse(&reply.mad) else { panic!() };
        // A peer of another implementation does not get the size of our receive queue: it would not
        // understand these bytes.
        assert_eq!((rep.announced, rep.qpn), (None, Qpn::new(0x77)));
        let asked = Packet::parse(&of_file().next().unwrap().bytes).unwrap();
        let (first, _) = CmMessage::parse(asked.payload()).unwrap();
        assert_eq!(header.tid, first.tid);
        // The next messages have another connection id, unknown here: only the DREQ is answered.
        for index in 2..of_file().count() {
            hear(&mut cm, index);
        }
        let answers = std::iter::from_fn(|| cm.poll_transmit()).map(|sent| sent.mad[17]);
        assert!(answers.eq([0x16]), "a DREP");
        assert_eq!((cm.poll_event(), cm.len()), (None, 1));
    }
}

/// A starting PSN belongs to the receiver of the message: its first packet has that PSN.
#[test]
fn starting_psns_are_those_that_the_other_side_sends_first() {
    for file in ["cm_rping_ipv4", "cm_rping_ipv6"] {
        let all = captures::all();
        let mut of_file = all.iter().filter(|captured| captured.file == file);
        let mut next = || Packet::parse(&of_file.next().unwrap().bytes).unwrap();
        let Ok((_, CmMessage::Req(req))) = CmMessage::parse(next().payload()) else { panic!() };
        let Ok((_, CmMessage::Rep(rep))) = CmMessage::parse(next().payload()) else { panic!() };
        let first_to = |qpn: Qpn| {
            let to = |packet: &Packet<'_>| packet.bth().dest_qpn == qpn && packet.info.is_request();
            let of_file = all.iter().filter(|captured| captured.file == file);
            let packets = of_file.map(|captured| Packet::parse(&captured.bytes).unwrap());
            packets.filter(to).map(|packet| packet.bth().psn).next()
        };
        assert_eq!((first_to(rep.qpn), first_to(req.qpn)), (Some(rep.psn), Some(req.psn)));
    }
}
