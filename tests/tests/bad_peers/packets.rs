//! Peers that agree on everything and then send wrong packets.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rocinante::verbs::{Psn, Qpn};
use rocinante_cli::perf::plan::Given;
use rocinante_cli::perf::test::Test;
use rocinante_cli::session::agreement;
use rocinante_stack::types::Pkey;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Aeth, Bth, NakCode, Opcode, Syndrome};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
use serde_json::{Value, json};

use self::Conduct::{Answers, Sends};
use super::{Addresses, PORT, SLACK, Trial, call, failed, left_nothing, serve};

/// The peer's packets.
struct Wire {
    socket: UdpSocket,
    template: Template,
    to: SocketAddr,
    /// The number of the victim's queue pair.
    qpn: u32,
    /// The starting PSN that this side announced to the victim.
    psn: u32,
}

const ROCE: u16 = 4791;
const QPN: u32 = 0xabcdef;
const PSN: u32 = 0x123456;
/// So far from the expected PSN that the exchange never gets there.
const FAR: u32 = 1 << 22;

impl Wire {
    fn new(own: Ipv4Addr, to: Ipv4Addr, qpn: u32) -> Self {
        let socket = UdpSocket::bind((own, ROCE)).unwrap();
        // This makes the kernel send 0 as the IP identification, on which the ICRC depends.
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let template = Template::new(&IpFields::V4 { src: own, dst: to, id: 0, flags: DF }, ROCE);
        Self { socket, template, to: (to, ROCE).into(), qpn, psn: PSN }
    }

    /// Sends a packet; `header` follows the BTH.
    fn send(&self, opcode: Opcode, psn: u32, header: &[u8], payload: usize, good: bool) {
        let mut bth = Bth::new(opcode, Pkey::DEFAULT, Qpn::new(self.qpn), Psn::new(psn));
        bth.ack_req = true;
        let mut packet = [&bth.bytes(), header, &vec![0x5a; payload], &[0; 4]].concat();
        self.template.seal(&mut packet);
        if !good {
            *packet.last_mut().unwrap() ^= 0x10;
        }
        let _ = self.socket.send_to(&packet, self.to);
    }

    fn respond(&self, psn: u32, syndrome: Syndrome) {
        self.respond_with(Opcode::RC_ACKNOWLEDGE, psn, syndrome, 0, true);
    }

    fn respond_with(&self, opcode: Opcode, psn: u32, syndrome: Syndrome, len: usize, good: bool) {
        let mut header = [0; Aeth::LEN];
        Aeth { syndrome, msn: 1 }.write(&mut header);
        self.send(opcode, psn, &header, len, good);
    }

    /// The next of the victim's packets, if one comes soon.
    fn receive(&self) -> Option<Bth> {
        let mut packet = [0; 9000];
        let (len, _) = self.socket.recv_from(&mut packet).ok()?;
        (len >= 16).then(|| Bth::read(packet.first_chunk().unwrap()))
    }
}

/// The conduct of this side.
#[derive(Clone, Copy)]
enum Conduct {
    /// What it does for each packet of the victim, by its PSN.
    Answers(fn(&Wire, u32)),
    /// What it does when no packet comes.
    Sends(fn(&Wire)),
}

/// Agrees with a victim, as its server, up to the first packet; returns the number of the victim's
/// queue pair.
fn answer(stream: &TcpStream, own: Ipv4Addr) -> u32 {
    let mut out = stream;
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let _request = lines.next().unwrap().unwrap();
    out.write_all(b"accepted\n").unwrap();
    let (hello, theirs) = hello(&lines.next().unwrap().unwrap(), own);
    out.write_all(format!("{hello}\n").as_bytes()).unwrap();
    // Echo each meeting point: this side has reached it, too.
    let mut echo = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if line.starts_with('!') || writeln!(echo, "{line}").is_err() {
                return;
            }
        }
    });
    theirs
}

/// As [`answer`], as the client of a victim that serves `command`.
fn ask(command: &str, stream: &TcpStream, own: Ipv4Addr) -> u32 {
    let mut out = stream;
    let request = if command.starts_with("perf send-bw") {
        let (size, iters, mtu) = (Some(100), Some(20), Some(1024));
        let given = Given { size, iters, mtu, ..Given::default() };
        agreement::request("perf send-bw", &given.plan(Test::SendBw))
    } else {
        let options = json!({"iters": 20, "size": 100, "mtu": 1024, "chk": false});
        agreement::request("pingpong", &options)
    };
    out.write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "accepted");
    let (hello, theirs) = hello(&lines.next().unwrap().unwrap(), own);
    out.write_all(format!("{hello}\nready\n").as_bytes()).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    theirs
}

/// The victim's hello with the queue pair of this side, and the number of the victim's.
fn hello(theirs: &str, own: Ipv4Addr) -> (Value, u32) {
    let mut hello: Value = serde_json::from_str(theirs).unwrap();
    let end = &mut hello["endpoints"][0];
    let qpn = end["qpn"].as_u64().unwrap();
    (end["address"], end["qpn"], end["psn"]) = (json!(own), json!(QPN), json!(PSN));
    (hello, qpn as u32)
}

struct PacketCase {
    name: &'static str,
    command: &'static str,
    victim_begins: bool,
    conduct: Conduct,
    words: &'static [&'static str],
    within: Duration,
}

impl PacketCase {
    fn run(&self) -> Result<(), String> {
        let addresses = Addresses::new();
        let [own, peer] = addresses.0;
        let (victim, stream, qpn, name);
        if self.victim_begins {
            let listener = TcpListener::bind((peer, PORT)).unwrap();
            victim = call(self.command, own, peer);
            stream = super::proxy::accept(&listener);
            qpn = answer(&stream, peer);
            name = SocketAddr::from((peer, PORT));
        } else {
            victim = serve(self.command, own);
            stream = super::proxy::reach((own, PORT).into());
            name = stream.local_addr().unwrap();
            qpn = ask(self.command, &stream, peer);
        }
        let begin = Instant::now();
        let wire = Wire::new(peer, own, qpn);
        let over = std::sync::atomic::AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    match (self.conduct, wire.receive()) {
                        (Answers(act), Some(bth)) => act(&wire, bth.psn.value()),
                        (Sends(act), None) => act(&wire),
                        _ => {}
                    }
                }
            });
            let done = victim.finish();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            done
        });
        let time = begin.elapsed();
        failed(&done, name, self.words)?;
        // The error also names the address from which the packets come.
        let address = IpAddr::from(peer).to_string();
        if !done.err.contains(&address) {
            return Err(format!("no {address} in: {}", done.err));
        }
        if time > self.within + SLACK {
            return Err(format!("it took {time:?}: {}", done.err));
        }
        left_nothing(own)
    }
}

/// Eight ACK timeouts of 67 ms.
const RETRIES: Duration = Duration::from_secs(5);
/// How long the victim may hear nothing.
const QUIET: Duration = Duration::from_secs(15);

const fn case(
    name: &'static str,
    conduct: Conduct,
    within: Duration,
    words: &'static [&'static str],
) -> PacketCase {
    PacketCase {
        name,
        command: "pingpong -n 20 -s 100",
        victim_begins: true,
        conduct,
        words,
        within,
    }
}

#[rustfmt::skip]
fn clients() -> Vec<PacketCase> {
    let mut all = vec![
        case("wrong ICRCs", Answers(|wire, psn| {
            wire.respond_with(Opcode::RC_ACKNOWLEDGE, psn, Syndrome::ACK_UNLIMITED, 0, false);
        }), RETRIES, &["dropped", "for icrc", "RETRY_EXC_ERR"]),
        case("ghost ACKs", Answers(|wire, psn| {
            wire.respond(psn.wrapping_add(FAR), Syndrome::ACK_UNLIMITED);
            wire.respond(psn.wrapping_sub(FAR), Syndrome::ACK_UNLIMITED);
        }), RETRIES, &["RETRY_EXC_ERR"]),
        case("misses for ever", Answers(|wire, psn| {
            wire.respond(psn, Syndrome::nak(NakCode::PsnSequenceError));
        }), QUIET, &[]),
        case("never ready", Answers(|wire, psn| wire.respond(psn, Syndrome::rnr(14))),
            QUIET, &["within 15 s"]),
        case("reserved codes", Answers(|wire, psn| {
            wire.respond(psn, Syndrome(0x4f));
            wire.respond(psn, Syndrome(0x7f));
        }), RETRIES, &["RETRY_EXC_ERR"]),
        case("refuses", Answers(|wire, psn| {
            wire.respond(psn, Syndrome::nak(NakCode::InvalidRequest));
        }), RETRIES, &["path MTU", "REM_INV_REQ_ERR"]),
    ];
    let perf = all.iter().map(|case| PacketCase {
        command: "perf send-bw -n 20 -s 100 -m 1024",
        words: match case.name {
            "never ready" => &["measuring: ", "within 15 s"],
            _ => case.words,
        },
        ..*case
    });
    let perf: Vec<PacketCase> = perf.collect();
    let others = all.iter().flat_map(|case| [
        PacketCase { command: "pingpong -e -n 20 -s 100", ..*case },
        PacketCase { command: "perf write-bw -n 20 -s 100 -m 1024", ..*case },
    ]);
    let others: Vec<PacketCase> = others.collect();
    for case in &mut all {
        case.words = match case.name {
            "wrong ICRCs" => &["first message: ", "for icrc"],
            "never ready" => &["first message: ", "within 15 s"],
            // Either limit may end it first.
            "misses for ever" => &["first message: "],
            "refuses" => &["first message: ", "path MTU", "REM_INV_REQ_ERR"],
            _ => &["first message: ", "RETRY_EXC_ERR"],
        };
    }
    all.extend(perf);
    all.extend(others);
    let short = case("short READ", Answers(|wire, psn| {
        let (opcode, syndrome) = (Opcode::RC_RDMA_READ_RESPONSE_ONLY, Aeth::ack(1).syndrome);
        wire.respond_with(opcode, psn, syndrome, 4, true);
    }), RETRIES, &["measuring: "]);
    all.push(PacketCase { command: "perf read-lat -n 20 -s 100", ..short });
    all
}

#[rustfmt::skip]
fn servers() -> Vec<PacketCase> {
    let cases = [
        case("wrong ICRCs", Sends(|wire| {
            wire.send(Opcode::RC_SEND_ONLY, wire.psn, &[], 100, false);
        }), QUIET, &["within 15 s", "for icrc"]),
        case("far ahead", Sends(|wire| {
            wire.send(Opcode::RC_SEND_ONLY, wire.psn.wrapping_add(FAR), &[], 100, true);
        }), QUIET, &["within 15 s"]),
        case("another path MTU", Sends(|wire| {
            wire.send(Opcode::RC_SEND_FIRST, wire.psn, &[], 512, true);
        }), RETRIES, &["path MTU"]),
        case("too long", Sends(|wire| {
            wire.send(Opcode::RC_SEND_ONLY, wire.psn, &[], 1024, true);
        }), RETRIES, &["LOC_LEN_ERR", "same size"]),
    ];
    let victims = ["pingpong", "pingpong -e", "perf send-bw"];
    let all = cases.iter().flat_map(|case| {
        victims.map(|command| PacketCase { command, victim_begins: false, ..*case })
    });
    all.collect()
}

pub(super) fn trials() -> Vec<Trial> {
    let cases = servers().into_iter().chain(clients());
    let name = |case: &PacketCase| format!("{} ({})", case.name, case.command);
    cases.map(|case| Trial::new(name(&case), move || case.run())).collect()
}
