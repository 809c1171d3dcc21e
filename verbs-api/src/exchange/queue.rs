//! An exchange over a queue pair that the connection manager connected: lines are bytes of SENDs.
//!
//! The private data of request and answer begins with [`MAGIC`], followed by the path MTU of the
//! side's link.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rocinante_soft::model::device::Provider;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::ConnectOptions;
use rocinante_soft::model::wc::Wc;
use rocinante_stack::mem::Access;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{RecvWr, SendData, SendOp, SendWr, WcStatus};

use super::PATIENCE;
use super::link::says_why_it_gave_up;
use crate::cm::{self, CmFailure, Connection, Params, RejReason, Request};
use crate::context::Context;
use crate::cq::Cq;
use crate::mr::Mr;
use crate::qp::PreparedQp;
use crate::tuning::exchange::{ANEW, LINE_MAX, LOOK, PROBE};

/// Starts the private data of both sides: protocol and version.
const MAGIC: &[u8; 8] = b"lines/1\n";
/// The most bytes of a SEND, and of a receive.
const SLOT: usize = 1024;
/// Number of posted receives.
const SLOTS: usize = 16;
/// Work request of the one SEND in flight; receives have the number of their slot.
const SENT: u64 = u64::MAX;

/// Connects to a peer that listens for such an exchange. While no program listens, it retries until
/// `patience` is over.
pub(super) fn connect(
    ctx: &Context,
    peer: SocketAddr,
    patience: Duration,
) -> Result<QueueLink, VerbsError> {
    let begin = Instant::now();
    let own = ctx.query_device().active_mtu;
    let kernels = ctx.provider() == Provider::Hardware;
    loop {
        let parts = Parts::new(ctx, gid_for(ctx.gids(), peer.ip()))?;
        let left = patience.saturating_sub(begin.elapsed());
        let left = if kernels { left.min(ANEW) } else { left };
        let params = Params::default().options(options()).private_data(&words(own));
        let error = match cm::connect(parts.qp, peer, &params, left.max(LOOK)) {
            Ok(connection) => {
                let theirs = mtu_of(connection.private_data()).ok_or_else(|| {
                    unknown_peer(
                        peer,
                        "it accepts, but does not speak as rocinante does: is it the right port?",
                    )
                })?;
                let local = SocketAddr::new(connection.qp().endpoint().address, 0);
                return Ok(QueueLink::new(
                    connection,
                    (parts.cq, parts.memory),
                    local,
                    own.min(theirs),
                ));
            }
            Err(error) => error,
        };
        let nobody = RejReason::INVALID_SERVICE_ID;
        let absent = matches!(&error, VerbsError::Cm(CmFailure::Rejected { reason, .. }) if *reason == nobody);
        // The connection manager gives an attempt up long before a patient caller.
        let lost = matches!(error, VerbsError::TimedOut);
        if !(absent || lost) || begin.elapsed() >= patience {
            return Err(cannot_connect(peer, error));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The index of the address to reach a peer from: the first of its kind, or else of its family.
fn gid_for(gids: &[IpAddr], peer: IpAddr) -> usize {
    let is_of_link = |ip: &IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let is_of_family = |own: &&IpAddr| own.is_ipv4() == peer.is_ipv4();
    let found = gids.iter().filter(is_of_family).find(|own| is_of_link(own) == is_of_link(&peer));
    let found = found.or_else(|| gids.iter().find(is_of_family));
    found.and_then(|found| gids.iter().position(|own| own == found)).unwrap_or(0)
}

/// Accepts a peer that requests such an exchange.
pub(super) fn accept(ctx: &Context, request: Request) -> Result<QueueLink, VerbsError> {
    let peer = request.peer();
    let Some(theirs) = mtu_of(request.private_data()) else {
        request.reject(b"this is a rocinante server, and it does not understand that")?;
        return Err(unknown_peer(peer, "it asks for another kind of connection"));
    };
    let own = ctx.query_device().active_mtu;
    let local = request.local();
    let gid = ctx.gids().iter().position(|gid| *gid == local).unwrap_or(0);
    let parts = Parts::new(ctx, gid)?;
    let params = Params::default().options(options()).private_data(&words(own));
    let connection = request.accept(parts.qp, &params).and_then(|accepted| accepted.wait(PATIENCE));
    let connection = connection.map_err(|error| unknown_peer(peer, &error.to_string()))?;
    let local = SocketAddr::new(local, 0);
    Ok(QueueLink::new(connection, (parts.cq, parts.memory), local, own.min(theirs)))
}

/// Whether a peer requests such an exchange.
pub(super) fn is_asked_for_by(request: &Request) -> bool {
    mtu_of(request.private_data()).is_some()
}

/// Any link carries that path MTU, and lines are short.
fn options() -> ConnectOptions {
    ConnectOptions::default().mtu(Some(Mtu::Mtu256))
}

fn words(own: Mtu) -> Vec<u8> {
    let mut words = MAGIC.to_vec();
    words.push(own.code());
    words
}

/// The path MTU of a peer that speaks this protocol.
fn mtu_of(private: &[u8]) -> Option<Mtu> {
    let code = *private.strip_prefix(MAGIC)?.first()?;
    Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
}

fn unknown_peer(peer: SocketAddr, what: &str) -> VerbsError {
    VerbsError::Exchange(format!("peer {peer}, connecting: {what}"))
}

fn cannot_connect(peer: SocketAddr, error: VerbsError) -> VerbsError {
    let advice = match &error {
        VerbsError::TimedOut => {
            ": no answer: is that the right address, is the server started with the connection \
             manager (--cm), and does the firewall between let UDP port 4791 through? Packets do \
             not survive a translation of addresses (NAT)"
        }
        VerbsError::Cm(CmFailure::Rejected { private_data, reason })
            if *reason == RejReason::CONSUMER =>
        {
            let end = private_data.iter().position(|byte| *byte == 0).unwrap_or(private_data.len());
            let said = super::printable(&String::from_utf8_lossy(&private_data[..end]));
            return VerbsError::Exchange(format!(
                "cannot connect to {peer}: it rejects the connection: {said}"
            ));
        }
        VerbsError::Cm(_) | VerbsError::Path(_) => "",
        _ => return error,
    };
    VerbsError::Exchange(format!("cannot connect to {peer}: {error}{advice}"))
}

/// The parts of a link, before it is connected.
struct Parts {
    qp: PreparedQp,
    cq: Cq,
    memory: Mr,
}

impl Parts {
    /// Posts the receives before the first lines arrive.
    fn new(ctx: &Context, gid_index: usize) -> Result<Self, VerbsError> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(SLOTS as u32 + 2)?);
        let memory = pd.allocate((SLOTS + 1) * SLOT, Access::LOCAL_WRITE)?;
        let qp = pd.qp(&cq, &cq).max_send_wr(2).max_recv_wr(SLOTS as u32).sgid_index(gid_index);
        let qp = qp.build()?;
        for slot in 0..SLOTS {
            qp.post_recv(&[RecvWr { wr_id: slot as u64, sges: &[memory.sge(slot * SLOT, SLOT)] }])?;
        }
        Ok(Self { qp, cq, memory })
    }
}

/// An ordered byte stream over a queue pair.
#[derive(Debug)]
pub(super) struct QueueLink {
    shared: Arc<Mutex<Shared>>,
    read: Vec<u8>,
    consumed: usize,
    local: SocketAddr,
    path_mtu: Mtu,
}

/// State that the reader and its watch share.
#[derive(Debug)]
struct Shared {
    connection: Connection,
    cq: Cq,
    /// The slots of receives, then the slot of the SEND.
    memory: Mr,
    /// Received bytes that are not read yet.
    came: Vec<u8>,
    /// Receives to post again once these bytes are read: a peer that sends faster than this side
    /// reads must wait.
    held: Vec<u64>,
    /// A SEND is in flight.
    sending: bool,
    /// A SEND failed.
    unsent: bool,
    /// How the connection ended, if it has: by a disconnection, or because the peer is silent.
    ended: Option<WcStatus>,
    /// Time of the last sign of life from the peer.
    alive: Instant,
}

impl QueueLink {
    fn new(
        connection: Connection,
        (cq, memory): (Cq, Mr),
        local: SocketAddr,
        path_mtu: Mtu,
    ) -> Self {
        let shared = Shared {
            connection,
            cq,
            memory,
            came: Vec::new(),
            held: Vec::new(),
            sending: false,
            unsent: false,
            ended: None,
            alive: Instant::now(),
        };
        let shared = Arc::new(Mutex::new(shared));
        Self { shared, read: Vec::new(), consumed: 0, local, path_mtu }
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// The largest path MTU of both links.
    pub(super) fn path_mtu(&self) -> Mtu {
        self.path_mtu
    }

    /// Sends all bytes, and waits until the peer's device has them.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut shared = self.shared.lock();
        for part in bytes.chunks(SLOT) {
            shared.settle(deadline)?;
            shared.send(part)?;
        }
        shared.settle(deadline)
    }

    pub(super) fn buffer(&self) -> &[u8] {
        &self.read[self.consumed..]
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.consumed += count;
        if self.consumed == self.read.len() {
            self.read.clear();
            self.consumed = 0;
        }
    }

    /// As [`Link::fill`](super::link::Link::fill).
    pub(super) fn fill(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        let deadline = wait.and_then(|wait| Instant::now().checked_add(wait));
        loop {
            let mut shared = self.shared.lock();
            shared.look()?;
            if !shared.came.is_empty() {
                self.read.append(&mut shared.came);
                shared.receive_on()?;
                return Ok(true);
            }
            match shared.ended {
                None => {}
                Some(WcStatus::RetryExcErr) => return Err(gone()),
                Some(_) => return Ok(false),
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(ErrorKind::WouldBlock.into());
            }
            shared.probe()?;
            shared.sleep(deadline)?;
        }
    }

    pub(super) fn watch(&self) -> QueueWatch {
        QueueWatch { shared: self.shared.clone() }
    }
}

/// The error if the peer's device is silent.
fn gone() -> io::Error {
    let why = "it does not answer any more (RETRY_EXC_ERR): its program was killed, or the network between is cut";
    io::Error::new(ErrorKind::NotConnected, why)
}

impl Shared {
    /// Handles the completions that are there.
    fn look(&mut self) -> io::Result<()> {
        // At most the completions that can be there now: a peer that never stops must not keep this
        // thread.
        for _ in 0..=SLOTS {
            let Some(wc) = self.cq.poll_one().map_err(io::Error::other)? else { break };
            self.take(&wc)?;
        }
        Ok(())
    }

    /// The received bytes were read, so there is room for more.
    fn receive_on(&mut self) -> io::Result<()> {
        while let Some(slot) = self.held.pop() {
            self.receive(slot)?;
        }
        Ok(())
    }

    fn receive(&self, slot: u64) -> io::Result<()> {
        let sges = [self.memory.sge(slot as usize * SLOT, SLOT)];
        let receive = RecvWr { wr_id: slot, sges: &sges };
        self.connection.post_recv(&[receive]).map_err(io::Error::other)
    }

    /// Waits for a completion, briefly.
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()));
        match self.cq.wait_one(left.min(LOOK)) {
            Ok(wc) => self.take(&wc),
            Err(VerbsError::TimedOut) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn take(&mut self, wc: &Wc) -> io::Result<()> {
        let of_send = wc.wr_id == SENT;
        if of_send {
            self.sending = false;
        }
        if wc.status != WcStatus::Success {
            self.unsent |= of_send;
            // The first status is the cause; the others are flushes.
            self.ended.get_or_insert(wc.status);
            return Ok(());
        }
        self.alive = Instant::now();
        if of_send {
            return Ok(());
        }
        let at = wc.wr_id as usize * SLOT;
        self.came.extend_from_slice(&self.memory.to_vec(at, wc.byte_len as usize));
        if self.came.len() > LINE_MAX {
            self.held.push(wc.wr_id);
            return Ok(());
        }
        self.receive(wc.wr_id)
    }

    /// Waits until the last SEND has arrived.
    fn settle(&mut self, deadline: Instant) -> io::Result<()> {
        loop {
            self.look()?;
            // The peer may hang up after the last line, before this side sees the completion.
            if !self.sending && !self.unsent {
                return Ok(());
            }
            match self.ended {
                None => {}
                Some(WcStatus::RetryExcErr) => return Err(gone()),
                Some(_) => return Err(ErrorKind::BrokenPipe.into()),
            }
            if Instant::now() >= deadline {
                return Err(ErrorKind::WouldBlock.into());
            }
            self.sleep(Some(deadline))?;
        }
    }

    fn send(&mut self, part: &[u8]) -> io::Result<()> {
        match self.ended {
            None => {}
            Some(WcStatus::RetryExcErr) => return Err(gone()),
            Some(_) => return Err(ErrorKind::BrokenPipe.into()),
        }
        let at = SLOTS * SLOT;
        self.memory.write(at, part);
        let sges = [self.memory.sge(at, part.len())];
        let sges = if part.is_empty() { &[][..] } else { &sges };
        let op = SendOp::Send { imm: None };
        let data = SendData::Sges(sges);
        let wr = SendWr::new(op, data).wr_id(SENT);
        self.connection.post_send(&[wr]).map_err(io::Error::other)?;
        self.sending = true;
        Ok(())
    }

    /// Probes a peer that has been silent for a while, by an empty SEND.
    fn probe(&mut self) -> io::Result<()> {
        if self.sending || self.ended.is_some() || self.alive.elapsed() < PROBE {
            return Ok(());
        }
        self.send(&[])
    }
}

/// Detects that the peer has gone.
#[derive(Debug)]
pub(super) struct QueueWatch {
    shared: Arc<Mutex<Shared>>,
}

impl QueueWatch {
    pub(super) fn is_gone(&self) -> bool {
        // A thread that holds the lock is reading, and detects it by itself.
        let Some(mut shared) = self.shared.try_lock() else { return false };
        if shared.look().and_then(|()| shared.probe()).is_err() {
            return true;
        }
        shared.ended.is_some() || says_why_it_gave_up(&shared.came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The interface may have its addresses in any order.
    #[test]
    fn a_peer_is_reached_from_an_address_of_its_kind() {
        let all = ["fe80::1", "fd00::1", "10.0.0.1", "fe80::2"];
        let own = |from: &[&str]| from.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<_>>();
        for (from, peer, index) in [
            (&all[..], "10.0.0.9", 2),
            (&all, "fe80::9", 0),
            (&all, "fd00::9", 1),
            (&all, "2001:db8::9", 1),
            // Where there is none of its kind one of its family may do.
            (&all[..1], "fd00::9", 0),
            (&all[1..3], "fe80::9", 0),
            (&all[2..], "fd00::9", 1),
            (&all[2..3], "fd00::9", 0),
        ] {
            assert_eq!(gid_for(&own(from), peer.parse().unwrap()), index, "{from:?} {peer}");
        }
    }
}
