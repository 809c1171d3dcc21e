//! `-z` and `-R`. With `-z` both sides talk over a queue pair that the connection manager connects.
//! With `-R` the connection manager connects the queue pairs of the measurement, too.
//!
//! With `-R` the server listens for both kinds of connections on one port. Once the control queue
//! pair is connected and all is agreed, the client asks for one connection per queue pair, in their
//! order. With `-c UD` it asks instead for the number of each of the server's queue pairs, on the
//! same port of `RDMA_PS_UDP`. If the server sends datagrams, too, the client's first datagram has
//! the number of the client's queue pair as immediate data.
//!
//! perftest's server begins to listen for those requests only after both sides have met, so our
//! client asks again. perftest's client does not ask again, so our server listens all the time.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rocinante::cm::{self, CmFailure, DatagramListener, Listener, Params, RejReason, Request};
use rocinante::verbs::{PeerPath, QpType, Qpn, SendData, SendOp};
use rocinante::{ConnectOptions, Context, Qp, RecvWr, SendWr, VerbsError, Wc, WcStatus};

use super::connect::{PerftestParts, Target};
use super::plan::{Managed, PerftestPlan};
use super::talk::Talk;
use crate::compat::device::{self, AddressChoice};
use crate::compat::queue::{Queue, ask_again};
use crate::compat::wire::{PATIENCE, Wire, printable};
use crate::ending;
use crate::output::{Failure, Kind, Output};
use crate::perf::Args;
use crate::session::address;
use crate::session::join::Joined;

/// Requests that may wait at the listener.
const BACKLOG: usize = 128;
/// Time during which a client asks again while no server listens, and a server waits for a client
/// that is silent.
const ABSENCE: Duration = Duration::from_secs(5);
/// Interval at which a side that waits for a request checks whether the peer goes on without one.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of a datagram that carries a queue pair's number. The number is in its immediate data.
const NUMBER_LEN: usize = 4;

/// The source of the connections.
pub(super) enum ManagedSide {
    /// This side asks the server at this address.
    Asks(SocketAddr),
    /// This side listens; with `-c UD` also for requests for datagrams.
    Listens(Listener, Option<DatagramListener>),
}

/// Opens the device, and meets the peer through it.
///
/// # Errors
/// There is no device, the port is taken, or no peer is there.
pub(super) fn meet(
    args: &Args,
    plan: &PerftestPlan,
    choice: AddressChoice,
    out: Output,
) -> Result<(Context, Wire, ManagedSide), Failure> {
    match &args.net.host {
        Some(host) => ask(args, host, choice, out),
        None => listen(args, plan, choice, out),
    }
}

fn ask(
    args: &Args,
    host: &str,
    choice: AddressChoice,
    out: Output,
) -> Result<(Context, Wire, ManagedSide), Failure> {
    let own = args.net.bind.as_ref();
    let server = args.net.patience.resolve(host, args.net.port, own, out)?;
    let route = address::local(server, own)?;
    let ctx = device::open(&args.net, &args.options.device, choice, route, out)?;
    let own = ctx.gids()[0];
    if own.is_ipv4() != server.is_ipv4() {
        return Err(Failure::Usage(format!(
            "{own} cannot reach {server}: by the connection manager (-R, -z) the packets go between the two addresses: give both of one family"
        )));
    }
    ending::enter("connecting");
    let queue = args.net.patience.ask(out, |left| Queue::connect(&ctx, server, left));
    let queue = queue.map_err(|error| cannot_connect(server, &error))?;
    Ok((ctx, Wire::over_queue(queue), ManagedSide::Asks(server)))
}

fn cannot_connect(server: SocketAddr, error: &VerbsError) -> Failure {
    let advice = match error {
        VerbsError::TimedOut => {
            ": no answer: is it the right address, was it given -R or -z as well, and does the firewall between let UDP port 4791 through?"
        }
        VerbsError::Cm(CmFailure::Rejected { reason, .. })
            if *reason == RejReason::INVALID_SERVICE_ID =>
        {
            ", and -R or -z"
        }
        _ => "",
    };
    let what = format!("cannot connect to {server}: {}{advice}", with_its_reason(error));
    Failure::Of(Kind::Connect, what)
}

/// The error, with the reason that the peer's program gives.
fn with_its_reason(error: &VerbsError) -> String {
    let words = match error {
        VerbsError::Cm(CmFailure::Rejected { private_data, .. }) => &private_data[..],
        _ => &[],
    };
    let end = words.iter().position(|byte| *byte == 0).unwrap_or(words.len());
    if end == 0 {
        return error.to_string();
    }
    format!("{error}: it says {:?}", printable(&words[..end]))
}

fn listen(
    args: &Args,
    plan: &PerftestPlan,
    choice: AddressChoice,
    out: Output,
) -> Result<(Context, Wire, ManagedSide), Failure> {
    let named = args.net.device.name.is_some() || args.options.device.ib_dev.is_some();
    let route = match &args.net.bind {
        Some(own) => own.first(),
        None if named => Ipv4Addr::UNSPECIFIED.into(),
        None => address::only()?,
    };
    let ctx = device::open(&args.net, &args.options.device, choice, route, out)?;
    let place = SocketAddr::new(ctx.gids()[0], args.net.port);
    let listener = Listener::bind(&ctx, place, BACKLOG)?;
    let datagrams = plan.managed == Managed::All && plan.service == QpType::Ud;
    let datagrams = datagrams.then(|| DatagramListener::bind(&ctx, place, BACKLOG)).transpose()?;
    ending::enter("waiting for a client");
    out.note(format_args!(
        "waiting for a client ({} {}) on {} port {} of the connection manager",
        super::program(args.test),
        if plan.managed == Managed::All { "-R" } else { "-z" },
        place.ip(),
        place.port()
    ));
    let wire = loop {
        match first(&ctx, listener.request(None)?) {
            Ok(queue) => break Wire::over_queue(queue),
            Err((peer, why)) => out.note(format_args!("{peer} is no client: {why}")),
        }
    };
    out.note(format_args!("client {}", wire.peer()));
    Ok((ctx, wire, ManagedSide::Listens(listener, datagrams)))
}

/// Accepts a request in the form of perftest's programs, and rejects others.
fn first(ctx: &Context, request: Request) -> Result<Queue, (SocketAddr, String)> {
    let peer = request.peer();
    let failed = |error: VerbsError| (peer, error.to_string());
    let is_silent = request.private_data().iter().all(|byte| *byte == 0);
    if request.qp_type() != QpType::Rc || !is_silent {
        request.reject(b"this is a perftest server (--compat perftest -R)").map_err(failed)?;
        return Err((peer, "it asks for another kind of connection".to_owned()));
    }
    Queue::accept(ctx, request, ABSENCE).map_err(failed)
}

impl ManagedSide {
    /// Connects a queue pair.
    ///
    /// # Errors
    /// The peer has no such queue pair, stays silent, or goes on without it.
    pub(super) fn connect(
        &self,
        parts: &PerftestParts,
        plan: &PerftestPlan,
        talk: &mut Talk,
        options: &ConnectOptions,
    ) -> Result<Joined, Failure> {
        let params = Params::default().options(*options);
        let connection = match self {
            Self::Asks(server) => {
                let local = parts.ctx.gids()[0];
                let ask = || cm::connect(parts.build(plan, local)?, *server, &params, PATIENCE);
                ask_again(Instant::now() + ABSENCE, ask)
            }
            Self::Listens(listener, _) => {
                let next = |wait| listener.request(Some(wait));
                let request = awaited(talk, next, Request::peer, Request::reject)?;
                parts.build(plan, request.local()).and_then(|qp| {
                    request.accept(qp, &params).and_then(|accepted| accepted.wait(PATIENCE))
                })
            }
        };
        let connection = connection.map_err(|why| talk.failed(with_its_reason(&why)))?;
        Ok(Joined::Managed(Box::new(connection)))
    }

    /// Creates a queue pair for datagrams and exchanges its number. Returns also the destination of
    /// its datagrams if it sends any.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(super) fn find(
        &self,
        parts: &PerftestParts,
        plan: &PerftestPlan,
        talk: &mut Talk,
        index: usize,
    ) -> Result<(Joined, Option<Target>), Failure> {
        let found = match self {
            Self::Asks(server) => resolve(parts, plan, *server),
            Self::Listens(_, None) => Err(Failure::Failed(
                "this side does not listen for datagrams: give it -c UD".to_owned(),
            )),
            Self::Listens(connections, Some(datagrams)) => {
                let next = |wait| {
                    if let Some(other) = connections.try_request()? {
                        // That client either gives up, or asks for datagrams.
                        let _ = other.reject(b"this side has -c UD");
                    }
                    datagrams.request(Some(wait))
                };
                let request =
                    awaited(talk, next, cm::DatagramRequest::peer, cm::DatagramRequest::reject)?;
                name(parts, plan, request, index)
            }
        };
        let (qp, target) = found.map_err(|why| talk.failed(why))?;
        Ok((Joined::Plain(Box::new(qp)), target))
    }
}

/// The client's next request. Requests of other clients are rejected.
fn awaited<T>(
    talk: &mut Talk,
    next: impl Fn(Duration) -> Result<T, VerbsError>,
    peer: impl Fn(&T) -> SocketAddr,
    refuse: impl Fn(T, &[u8]) -> Result<(), VerbsError>,
) -> Result<T, Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match next(LOOK) {
            Ok(request) if peer(&request).ip() == talk.wire().peer().ip() => return Ok(request),
            // The other client may miss the reason; that does no harm here.
            Ok(request) => drop(refuse(request, b"another client is being served")),
            Err(VerbsError::TimedOut) => {}
            Err(error) => return Err(talk.failed(error)),
        }
        if talk.has_message() || Instant::now() > deadline {
            return Err(talk.failed(
                "it does not connect as many queue pairs as this side has, of this type: were both sides given the same -q and -c?",
            ));
        }
    }
}

/// Whether the server sends datagrams, too, and must learn their destination.
fn is_answered(plan: &PerftestPlan) -> bool {
    plan.both || !plan.test.is_bandwidth()
}

type Found = Result<(Qp, Option<Target>), Failure>;

/// On the client: asks for one of the server's queue pairs, and sends the number of its own.
fn resolve(parts: &PerftestParts, plan: &PerftestPlan, server: SocketAddr) -> Found {
    let local = parts.ctx.gids()[0];
    let qp = parts.build(plan, local)?.ready()?;
    let ask = || cm::resolve(&parts.ctx, 0, server, b"", PATIENCE);
    let service = ask_again(Instant::now() + ABSENCE, ask)?;
    let ah = parts.target(plan, local, PeerPath::new(server.ip()))?;
    let target = Target { ah, qpn: service.qpn(), qkey: service.qkey() };
    if is_answered(plan) {
        let imm = Some(qp.qpn().value().to_be_bytes());
        let op = SendOp::SendTo { to: target.to(), imm };
        let sges = [parts.mr.sge(0, NUMBER_LEN)];
        let data = SendData::Sges(&sges);
        let wr = SendWr::new(op, data);
        qp.post_send(&[wr]).map_err(VerbsError::from)?;
        completed(parts.cqs[0].wait_one(PATIENCE))?;
    }
    Ok((qp, Some(target)))
}

/// On the server: names a queue pair, and learns the number of the client's.
fn name(
    parts: &PerftestParts,
    plan: &PerftestPlan,
    request: cm::DatagramRequest,
    index: usize,
) -> Found {
    let (local, peer) = (request.local(), request.peer().ip());
    let qp = parts.build(plan, local)?.ready()?;
    if !is_answered(plan) {
        request.accept(&qp, b"")?;
        return Ok((qp, None));
    }
    let sges = [parts.mr.sge(parts.landing(plan, index), plan.head() + NUMBER_LEN)];
    qp.post_recv(&[RecvWr { wr_id: 0, sges: &sges }]).map_err(VerbsError::from)?;
    request.accept(&qp, b"")?;
    let wc = completed(parts.cqs[1].wait_one(PATIENCE))?;
    let Some(number) = wc.imm.map(u32::from_be_bytes) else {
        let why = "its first datagram does not tell its queue pair's number: were both sides given the same test and -b?";
        return Err(Failure::Failed(why.to_owned()));
    };
    let ah = parts.target(plan, local, PeerPath::new(peer))?;
    Ok((qp, Some(Target { ah, qpn: Qpn::new(number & 0xff_ffff), qkey: cm::UDP_QKEY })))
}

fn completed(wc: Result<Wc, VerbsError>) -> Result<Wc, Failure> {
    match wc {
        Ok(wc) if wc.status == WcStatus::Success => Ok(wc),
        Ok(wc) => Err(Failure::Failed(format!("the first datagram ended in {}", wc.status))),
        Err(VerbsError::TimedOut) => Err(Failure::Failed(format!(
            "it did not tell its queue pair's number within {} s: were both sides given the same test and -b? Or the datagram was lost: begin again",
            PATIENCE.as_secs()
        ))),
        Err(error) => Err(error.into()),
    }
}
