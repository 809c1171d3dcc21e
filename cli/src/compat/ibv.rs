//! `rocinante pingpong --compat ibv`: the other side is `ibv_rc_pingpong`, or with `ibv-uc`,
//! `ibv-ud`, `ibv-srq` another of rdma-core's ping-pongs.
//!
//! Both sides exchange the addresses of their queue pairs ([`message`]): the client first, the
//! server when its queue pairs are ready. Then the client says `done` and both close the
//! connection. They agree on nothing else: the user must give size, number and path MTU to both.
//! Then SENDs go back and forth ([`game`]), and each side sends what it received.

pub mod game;
pub mod message;

use std::net::IpAddr;

use clap::ValueEnum;
use rocinante::verbs::{GRH_LEN, Mtu, PeerPath, Psn, QpType, Qpn, SendOp};
use rocinante::{
    Access, Ah, CompChannel, ConnectOptions, Context, Cq, Endpoint, Mr, Pd, PreparedQp, Qp, RecvWr,
    Srq, VerbsError,
};

use crate::compat::device::{self, AddressChoice};
use crate::compat::gid;
use crate::compat::wire::Wire;
use crate::ending;
use crate::output::{Failure, Output};
use crate::pingpong::game::Played;
use crate::pingpong::{Args, Place};
use crate::session::{self, Own, address};
use game::IbvGame;
use message::Address;

/// The program of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IbvProgram {
    /// ibv_rc_pingpong: one queue pair
    Ibv,
    /// ibv_uc_pingpong: an unreliable connection
    IbvUc,
    /// ibv_ud_pingpong: datagrams, no longer than the path MTU of the link
    IbvUd,
    /// ibv_srq_pingpong: several (-q); the number of exchanges (-n) is of all together
    IbvSrq,
}

impl IbvProgram {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ibv => "ibv_rc_pingpong",
            Self::IbvUc => "ibv_uc_pingpong",
            Self::IbvUd => "ibv_ud_pingpong",
            Self::IbvSrq => "ibv_srq_pingpong",
        }
    }

    /// Number of addresses that each side sends, even if it has fewer queue pairs.
    const fn addresses(self) -> usize {
        match self {
            Self::Ibv | Self::IbvUc | Self::IbvUd => 1,
            Self::IbvSrq => 256,
        }
    }

    const fn qp_type(self) -> QpType {
        match self {
            Self::Ibv | Self::IbvSrq => QpType::Rc,
            Self::IbvUc => QpType::Uc,
            Self::IbvUd => QpType::Ud,
        }
    }

    /// Bytes before a message in the memory of a receive.
    const fn head(self) -> usize {
        match self {
            Self::IbvUd => GRH_LEN,
            Self::Ibv | Self::IbvUc | Self::IbvSrq => 0,
        }
    }

    /// Default message size in bytes.
    const fn size(self) -> u32 {
        match self {
            Self::IbvUd => 1024,
            Self::Ibv | Self::IbvUc | Self::IbvSrq => 4096,
        }
    }
}

/// Number of queue pairs by default, and its maximum in `ibv_srq_pingpong`.
const QPS: u32 = 16;
const QPS_MAX: u32 = 255;
/// The READs and atomics in flight that those programs allow on either side.
const RD_ATOMIC: u8 = 1;
/// The Q_Key of both sides.
const QKEY: u32 = 0x1111_1111;
/// 0.27 s: the other side may be an emulated machine that does not always get a core.
const TIMEOUT: u8 = 16;

/// The options of a ping-pong, as the user gave them to this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The program of the other side.
    pub program: IbvProgram,
    /// Whether this side is the client, which sends first.
    pub begins: bool,
    /// Queue pairs.
    pub qps: u32,
    /// Exchanges, over all queue pairs.
    pub iters: u64,
    /// Bytes of a message.
    pub size: usize,
    /// Path MTU.
    pub mtu: Mtu,
    /// Receives posted at a time, over all queue pairs.
    pub rx_depth: u32,
    /// Whether this side sleeps until a completion arrives.
    pub events: bool,
    /// Whether this side compares every byte of every message.
    pub chk: bool,
}

impl Rules {
    /// Whether the queue pairs share their receives.
    const fn shares(&self) -> bool {
        matches!(self.program, IbvProgram::IbvSrq)
    }

    /// Number of seats. A seat owns receives: one seat per queue pair, or one per receive where the
    /// queue pairs share their receives.
    const fn seats(&self) -> usize {
        (if self.shares() { self.rx_depth } else { self.qps }) as usize
    }

    /// Receives of a seat.
    const fn each(&self) -> u32 {
        if self.shares() { 1 } else { self.rx_depth.div_ceil(self.qps) }
    }

    /// The rules that the command line gives.
    ///
    /// # Errors
    /// The options contradict each other or are out of range.
    pub fn new(args: &Args, program: IbvProgram) -> Result<Self, Failure> {
        let usage = |why: String| Err(Failure::Usage(why));
        let qps = match (program, args.num_qp) {
            (IbvProgram::IbvSrq, given) => given.unwrap_or(QPS),
            (_, Some(1) | None) => 1,
            (one, Some(_)) => {
                let name = one.name();
                return usage(format!("{name} has one queue pair: -q is for --compat ibv-srq"));
            }
        };
        if qps > QPS_MAX {
            return usage(format!(
                "ibv_srq_pingpong takes {QPS_MAX} queue pairs at most: -q {qps}"
            ));
        }
        if args.rx_depth < qps {
            return usage(format!(
                "-r {} is too small for {qps} queue pairs: each needs a receive",
                args.rx_depth
            ));
        }
        Ok(Self {
            program,
            begins: args.net.host.is_some(),
            qps,
            iters: args.iters.unwrap_or(1000),
            size: args.size.unwrap_or(program.size()) as usize,
            mtu: args.mtu.unwrap_or(Mtu::Mtu1024),
            rx_depth: args.rx_depth,
            events: args.events,
            chk: args.chk,
        })
    }
}

/// The result of a ping-pong.
#[derive(Debug)]
pub struct IbvOutcome {
    /// The device that was used.
    pub ctx: Context,
    /// The queue pairs of this side.
    pub local: Vec<Place>,
    /// The peer's.
    pub remote: Vec<Place>,
    /// What was played.
    pub played: Played,
    /// Why the game ended too early, if it did.
    pub ended: Result<(), Failure>,
}

/// Plays ping-pong with such a program.
///
/// # Errors
/// The peer says something else, goes, or stays silent; there is no device; or a request fails. The
/// text names the peer and the phase.
pub fn run(args: &Args, rules: &Rules, out: Output) -> Result<IbvOutcome, Failure> {
    let mut wire = meet(args, rules, out)?;
    let choice =
        args.gid_idx.map_or(AddressChoice::Any, |index| AddressChoice::Gid { index, option: "-g" });
    let ctx = device::open(&args.net, &args.device, choice, wire.local()?, out)?;
    let table = UnconnectedQps::lay(&ctx, rules)?;
    let local: Vec<Place> = table.qps.iter().map(|qp| Place::from(&qp.endpoint())).collect();
    local.iter().for_each(|place| out.line(format_args!("  local address:  {place}")));
    table.post_receives(rules)?;
    let (table, remote) = table.connect(&ctx, rules, &mut wire, out)?;
    wire.enter("first message");
    let mut played = Played::default();
    let ended = IbvGame::new(&ctx, rules, table, wire).play(&mut played);
    Ok(IbvOutcome { ctx, local, remote, played, ended })
}

/// A new connection over TCP, before any message.
fn meet(args: &Args, rules: &Rules, out: Output) -> Result<Wire, Failure> {
    let (port, program) = (args.net.port, rules.program.name());
    if let Some(host) = &args.net.host {
        ending::enter("connecting");
        return Wire::connect(host, port, args.net.patience.time(), program);
    }
    // The packets' address may be of another family than the connection over TCP.
    let bind = args.net.bind.as_ref().and_then(Own::only).filter(IpAddr::is_ipv4);
    let listener = address::listen(bind, port)?;
    ending::enter("waiting for a client");
    out.note(format_args!("waiting for a client ({program}) on TCP port {port}"));
    let wire = Wire::accept(&listener)?;
    out.note(format_args!("client {}", wire.peer()));
    Ok(wire)
}

/// Queue pairs before they are connected, and the objects that they use.
struct UnconnectedQps {
    pd: Pd,
    cq: Cq,
    channel: Option<CompChannel>,
    memory: Mr,
    srq: Option<Srq>,
    qps: Vec<PreparedQp>,
}

/// As `UnconnectedQps`, with connected queue pairs.
#[derive(Debug)]
pub struct Laid {
    cq: Cq,
    channel: Option<CompChannel>,
    memory: Mr,
    srq: Option<Srq>,
    qps: Vec<Qp>,
    /// The destination of each queue pair, if it sends datagrams.
    ahs: Vec<(Ah, Qpn)>,
    peer: IpAddr,
}

impl Laid {
    /// Posts one receive for a seat.
    fn post_recv(&self, wr: &RecvWr<'_>, seat: usize) -> Result<(), VerbsError> {
        let posted = match &self.srq {
            Some(srq) => srq.post_recv(std::slice::from_ref(wr)),
            None => self.qps[seat].post_recv(std::slice::from_ref(wr)),
        };
        posted.map_err(VerbsError::from)
    }

    /// The index of the queue pair with this number.
    fn qp_of(&self, qpn: Qpn) -> Option<usize> {
        self.qps.iter().position(|qp| qp.qpn() == qpn)
    }

    /// The operation that sends a message on the queue pair with this index.
    fn send_op(&self, index: usize) -> SendOp {
        match self.ahs.get(index) {
            None => SendOp::Send { imm: None },
            Some((ah, qpn)) => SendOp::SendTo { to: ah.to(*qpn, QKEY), imm: None },
        }
    }
}

impl UnconnectedQps {
    fn lay(ctx: &Context, rules: &Rules) -> Result<Self, Failure> {
        let channel = rules.events.then(|| ctx.create_comp_channel()).transpose()?;
        let each = rules.each();
        let depth = rules.qps + rules.rx_depth.max(rules.qps * each);
        let cq = match &channel {
            Some(channel) => ctx.create_cq_with(depth, channel)?,
            None => ctx.create_cq(depth)?,
        };
        let pd = ctx.alloc_pd();
        let bytes = game::bytes(rules).max(1);
        let memory = pd.allocate(bytes, Access::LOCAL_WRITE)?;
        let (qp_type, longest) = (rules.program.qp_type(), ctx.query_device().active_mtu);
        if qp_type == QpType::Ud && rules.size > longest.bytes() as usize {
            let size = rules.size;
            return Err(Failure::Usage(format!(
                "-s {size}: a datagram has {longest} bytes at most on this link"
            )));
        }
        let srq = rules.shares().then(|| pd.create_srq(rules.rx_depth, 1)).transpose()?;
        let build = |_| {
            let qp = pd.qp(&cq, &cq).qp_type(qp_type).qkey(QKEY).max_send_wr(1);
            match &srq {
                Some(srq) => qp.srq(srq).build(),
                None => qp.max_recv_wr(each).build(),
            }
        };
        let qps = (0..rules.qps).map(build).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { pd, cq, channel, memory, srq, qps })
    }

    fn post_receives(&self, rules: &Rules) -> Result<(), Failure> {
        for seat in 0..rules.seats() {
            game::clear(rules, &self.memory, seat);
            let sges = game::landing(rules, &self.memory, seat);
            for _ in 0..rules.each() {
                let wr = RecvWr { wr_id: game::recv_id(seat), sges: &sges };
                let posted = match &self.srq {
                    Some(srq) => srq.post_recv(&[wr]),
                    None => self.qps[seat].post_recv(&[wr]),
                };
                posted.map_err(VerbsError::from)?;
            }
        }
        Ok(())
    }

    /// Sends the addresses of the queue pairs, receives the peer's, and connects them. The server
    /// connects first and then sends, because its message says that it is ready.
    fn connect(
        self,
        ctx: &Context,
        rules: &Rules,
        wire: &mut Wire,
        out: Output,
    ) -> Result<(Laid, Vec<Place>), Failure> {
        let Self { pd, cq, channel, memory, srq, qps: prepared } = self;
        let ends: Vec<Endpoint> = prepared.iter().map(PreparedQp::endpoint).collect();
        let own = message::all(&ends, rules.program.addresses());
        wire.enter("telling addresses");
        if rules.begins {
            wire.send(&own)?;
        }
        let remote = receive_endpoints(rules, wire, ends[0].address)?;
        remote.iter().for_each(|end| {
            out.line(format_args!("  remote address: {}", Place::from(end)));
        });
        let options = ConnectOptions::default()
            .mtu(Some(rules.mtu))
            .max_rd_atomic(RD_ATOMIC)
            .max_dest_rd_atomic(RD_ATOMIC)
            .timeout(TIMEOUT);
        let pairs = prepared.into_iter().zip(&remote);
        let mut ahs = Vec::new();
        let connected = pairs.map(|(qp, peer)| {
            if rules.program.qp_type() != QpType::Ud {
                return session::connect_qp(ctx, qp, peer, &options);
            }
            let local = qp.endpoint().address;
            let gid_index = ctx.gids().iter().position(|gid| *gid == local).unwrap_or(0);
            ahs.push((pd.create_ah(&PeerPath::to(peer).sgid_index(gid_index))?, peer.qpn));
            Ok(qp.ready()?)
        });
        let qps = connected.collect::<Result<Vec<_>, _>>().map_err(|why| wire.failed(why))?;
        if rules.begins {
            wire.send(message::DONE)?;
        } else {
            wire.send(&own)?;
            let done = wire.receive::<{ message::DONE.len() }>()?;
            if done != *message::DONE {
                return Err(wire.failed("it did not end the exchange with \"done\""));
            }
        }
        let places = remote.iter().map(Place::from).collect();
        Ok((Laid { cq, channel, memory, srq, qps, ahs, peer: remote[0].address }, places))
    }
}

/// Receives the addresses of the peer's queue pairs: as many as this side has.
fn receive_endpoints(
    rules: &Rules,
    wire: &mut Wire,
    local: IpAddr,
) -> Result<Vec<Endpoint>, Failure> {
    let mut messages = Vec::with_capacity(rules.program.addresses());
    for _ in 0..rules.program.addresses() {
        messages.push(wire.receive::<{ message::LEN }>()?);
    }
    let mut remote = Vec::with_capacity(rules.qps as usize);
    for (index, bytes) in messages.iter().take(rules.qps as usize).enumerate() {
        let parsed = Address::parse(bytes).and_then(|address| address.endpoint(rules.mtu));
        let end = parsed.map_err(|why| {
            wire.failed(format_args!("the address of its queue pair {}: {why}", index + 1))
        })?;
        gid::same_family(local, end.address, "-g").map_err(|why| wire.failed(why))?;
        remote.push(end);
    }
    Ok(remote)
}

impl Address {
    /// The endpoint to connect a queue pair to.
    fn endpoint(&self, mtu: Mtu) -> Result<Endpoint, String> {
        if self.qpn < 2 {
            return Err(format!(
                "{} is no number of one: give both sides the same number of them (-q)",
                self.qpn
            ));
        }
        let address = gid::address(self.gid, "-g")?;
        Ok(Endpoint::new(address, Qpn::new(self.qpn), Psn::new(self.psn), mtu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compat::wire::pair::connected;
    use std::io::Write;
    use std::time::Duration;

    fn rules(program: IbvProgram, qps: u32) -> Rules {
        Rules {
            program,
            begins: false,
            qps,
            iters: 1,
            size: 1,
            mtu: Mtu::Mtu1024,
            rx_depth: 500,
            events: false,
            chk: false,
        }
    }

    fn endpoints_of(program: IbvProgram, qps: u32, words: &[u8]) -> Result<Vec<Endpoint>, String> {
        let (mut wire, mut other) = connected();
        wire.enter("telling addresses");
        wire.set_patience(Duration::from_millis(100));
        other.write_all(words).unwrap();
        let local = IpAddr::from([10, 0, 0, 1]);
        receive_endpoints(&rules(program, qps), &mut wire, local)
            .map_err(|failure| failure.to_string())
    }

    const GOOD: &[u8; message::LEN] = b"0000:000011:5b2c1f:00000000000000000000ffff0a000002\0";

    #[test]
    fn a_peer_is_understood() {
        let [end] = endpoints_of(IbvProgram::Ibv, 1, GOOD).unwrap()[..] else { panic!("not one") };
        assert_eq!(end.address, IpAddr::from([10, 0, 0, 2]));
        assert_eq!((end.qpn.value(), end.psn.value()), (0x11, 0x5b_2c1f));
    }

    #[test]
    fn a_peer_with_fewer_queue_pairs_is_told_apart() {
        let mut words = GOOD.repeat(2);
        words.extend(b"0000:000000:000000:00000000000000000000000000000000\0".repeat(254));
        assert_eq!(endpoints_of(IbvProgram::IbvSrq, 2, &words).unwrap().len(), 2);
        let why = endpoints_of(IbvProgram::IbvSrq, 3, &words).unwrap_err();
        assert!(why.contains("queue pair 3") && why.contains("-q"), "{why}");
    }

    #[test]
    fn bad_peers_are_named_with_the_phase() {
        let v6 = b"0000:000011:5b2c1f:fd770000000000000000000000000002\0";
        let local = b"0000:000011:5b2c1f:fe800000000000000000000000000002\0";
        let none = b"0000:000011:5b2c1f:00000000000000000000000000000000\0";
        for (words, word) in [
            (&v6[..], "family"),
            (&local[..], "link-local"),
            (&none[..], "-g"),
            (&GOOD[..20], "20 bytes of a message of 52"),
            (&[0xff; message::LEN][..], "is no address"),
            (
                &b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: none\r\n\r\n"[..],
                "is no address",
            ),
            (&[][..], "0 bytes"),
        ] {
            let why = endpoints_of(IbvProgram::Ibv, 1, words).unwrap_err();
            let word = if word == "family" { "both IPv6" } else { word };
            assert!(why.contains(word), "no {word:?} in: {why}");
            assert!(why.starts_with("peer 127.0.0.1:") && why.contains("telling addresses"));
        }
    }
}
