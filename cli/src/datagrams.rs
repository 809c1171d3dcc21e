//! Queue pairs for datagrams, with room for all sends and receives of a run at once.
//! [`udaddy`](crate::udaddy) and [`mckey`](crate::mckey) use them, to talk to librdmacm's `udaddy`
//! and `mckey`.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::verbs::{Destination, GRH_LEN, QpType, Qpn, SendData, SendOp, WcOpcode};
use rocinante::{
    Access, Ah, Context, Cq, Mr, Pd, Qp, RecvWr, SendWr, VerbsError, Wc, WcStatus, cm,
};

use crate::ending;
use crate::output::{Failure, Kind};

const RECV: u64 = 1;
const SEND: u64 = 2;

/// The messages of either side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DatagramPlan {
    /// Messages of each queue pair.
    pub(crate) count: u32,
    /// Bytes of a message.
    pub(crate) size: u32,
    /// Time limit for the next message.
    pub(crate) patience: Duration,
}

/// A queue pair, its completion queue and its buffer.
pub(crate) struct Node {
    pub(crate) qp: Qp,
    pub(crate) pd: Pd,
    cq: Cq,
    /// The one buffer of all messages, in and out, as in librdmacm's programs.
    buffer: Mr,
    plan: DatagramPlan,
    sent: u32,
    received: u32,
    /// The first datagram: its completion, and the header before it.
    first: Option<(Wc, [u8; GRH_LEN])>,
}

impl Node {
    /// Creates a node at the device's address of this index, ready to send.
    pub(crate) fn new(
        ctx: &Context,
        gid_index: usize,
        plan: DatagramPlan,
    ) -> Result<Self, Failure> {
        let mtu = ctx.query_device().active_mtu.bytes();
        if plan.size > mtu {
            return Err(Failure::Usage(format!(
                "a message of {} bytes is larger than a packet: {mtu} at most",
                plan.size
            )));
        }
        let depth = plan.count.max(1);
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(2 * depth)?);
        let buffer = pd.allocate(GRH_LEN + plan.size as usize, Access::LOCAL_WRITE)?;
        let text: Vec<u8> = (b'A'..=b'Z').cycle().take(plan.size as usize).collect();
        buffer.write(GRH_LEN, &text);
        let qp = pd.qp(&cq, &cq).qp_type(QpType::Ud).qkey(cm::UDP_QKEY);
        let qp = qp.max_send_wr(depth).max_recv_wr(depth).sgid_index(gid_index).build()?;
        let qp = qp.ready()?;
        Ok(Self { qp, pd, cq, buffer, plan, sent: 0, received: 0, first: None })
    }

    /// Posts receives for all messages.
    pub(crate) fn post_receives(&self) -> Result<(), Failure> {
        let sges = [self.buffer.sge(0, self.buffer.len())];
        for _ in 0..self.plan.count {
            let receive = RecvWr { wr_id: RECV, sges: &sges };
            self.qp.post_recv(&[receive]).map_err(VerbsError::from)?;
        }
        Ok(())
    }

    /// Sends all messages, each with this queue pair's number as its immediate data. Waits for
    /// their completions.
    pub(crate) fn send(&mut self, to: Destination) -> Result<(), Failure> {
        let number = self.qp.qpn().value().to_be_bytes();
        let sges = [self.buffer.sge(GRH_LEN, self.plan.size as usize)];
        let (op, data) = (SendOp::SendTo { to, imm: Some(number) }, SendData::Sges(&sges));
        let wr = SendWr::new(op, data).wr_id(SEND);
        for _ in 0..self.plan.count {
            self.qp.post_send(&[wr]).map_err(VerbsError::from)?;
        }
        self.complete(|node| node.sent)
    }

    /// Waits until all messages have arrived.
    pub(crate) fn receive(&mut self) -> Result<(), Failure> {
        self.complete(|node| node.received)
    }

    fn complete(&mut self, done: impl Fn(&Self) -> u32) -> Result<(), Failure> {
        let mut deadline = Instant::now() + self.plan.patience;
        while done(self) < self.plan.count {
            ending::check_signal()?;
            let left = deadline.saturating_duration_since(Instant::now());
            let wc = match self.cq.wait_one(left.min(ending::LOOK)) {
                Ok(wc) => wc,
                Err(VerbsError::TimedOut) if left > ending::LOOK => continue,
                Err(VerbsError::TimedOut) => return Err(self.too_few()),
                Err(error) => return Err(error.into()),
            };
            if wc.status != WcStatus::Success {
                let what = format!("a request failed: {}", wc.status);
                return Err(Failure::Of(Kind::Completion(wc.status), what));
            }
            deadline = Instant::now() + self.plan.patience;
            if wc.opcode != WcOpcode::Recv {
                self.sent += 1;
                continue;
            }
            self.received += 1;
            if self.first.is_none() {
                let header = self.buffer.to_vec(0, GRH_LEN);
                self.first = header.first_chunk().map(|header| (wc, *header));
            }
        }
        Ok(())
    }

    fn too_few(&self) -> Failure {
        let Self { sent, received, plan, .. } = self;
        let what = format!(
            "{received} of {} datagrams have come ({sent} have left): datagrams may be lost; does a firewall let UDP port \
             4791 through?",
            plan.count
        );
        Failure::Of(Kind::Silence, what)
    }

    /// An address handle for the sender of the first datagram, and the queue pair that this
    /// datagram names.
    pub(crate) fn answer(&self) -> Result<(Ah, Destination), Failure> {
        let none = || {
            Failure::Failed(
                "no datagram has come whose sender could be answered: does the client send?".into(),
            )
        };
        let (wc, header) = self.first.as_ref().ok_or_else(none)?;
        let named = wc.imm.map(u32::from_be_bytes).ok_or_else(|| {
            Failure::Failed(
                "the peer's datagrams do not name its queue pair: they have no immediate data"
                    .into(),
            )
        })?;
        let ah = self.pd.create_ah_from_wc(wc, header)?;
        let to = ah.to(Qpn::new(named), cm::UDP_QKEY);
        Ok((ah, to))
    }

    /// Messages sent and received.
    pub(crate) fn counts(&self) -> (u32, u32) {
        (self.sent, self.received)
    }

    /// The local address.
    pub(crate) fn local(&self) -> IpAddr {
        self.qp.endpoint().address
    }
}
