//! The rounds of `rping`, for both sides.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::cm::Connection;
use rocinante::verbs::{Key, SendData, SendOp, Sge, WcOpcode};
use rocinante::{
    Access, CompChannel, Context, Cq, Mr, PreparedQp, RecvWr, SendWr, VerbsError, Wc, WcStatus,
};

use crate::ending;
use crate::output::{Failure, Kind, Output, Result};
use crate::session::diagnosis;

/// The shortest text: it has room for the round's number.
pub(super) const SIZE_MIN: u32 = 26;
/// The longest text, as long as rping's buffer.
pub(super) const SIZE_MAX: u32 = 64 * 1024 - 1;

/// Address, key and length of a buffer, big-endian (`struct rping_rdma_info`).
const ADVERT: usize = 16;
/// Offsets in the control region: the advert to send, and the received one.
const OUT: usize = 0;
const IN: usize = ADVERT;

const RECV: u64 = 1;
const SEND: u64 = 2;
const RDMA: u64 = 3;

/// All objects of a game except the connection.
pub(super) struct Prepared {
    qp: PreparedQp,
    parts: Parts,
}

struct Parts {
    ctx: Context,
    cq: Cq,
    channel: CompChannel,
    /// Two adverts, one out and one in.
    control: Mr,
    /// Two texts: the client's own, and the one that comes back.
    texts: Mr,
    size: u32,
    local: IpAddr,
    netdev: &'static str,
}

/// A connection and the state of the game.
pub(super) struct RpingGame {
    pub(super) connection: Connection,
    pub(super) rounds: u64,
    pub(super) time: Duration,
    pub(super) size: u32,
    pub(super) local: IpAddr,
    pub(super) netdev: &'static str,
    parts: Parts,
    /// Number of received adverts that are not read yet.
    adverts: u32,
    /// Whether the peer has ended the connection.
    gone: bool,
}

/// Creates a queue pair with one receive, at the device's address of this index, and buffers for
/// texts of `size` bytes.
pub(super) fn prepare(ctx: &Context, gid_index: usize, size: u32) -> Result<Prepared, VerbsError> {
    let pd = ctx.alloc_pd();
    let channel = ctx.create_comp_channel()?;
    let cq = ctx.create_cq_with(32, &channel)?;
    let control = pd.allocate(2 * ADVERT, Access::LOCAL_WRITE)?;
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let texts = pd.allocate(2 * size as usize, Access::LOCAL_WRITE | remote)?;
    let qp = pd
        .qp(&cq, &cq)
        .access(remote)
        .max_send_wr(16)
        .max_recv_wr(2)
        .sgid_index(gid_index)
        .build()?;
    let local = qp.endpoint().address;
    let netdev = ctx.provider().name();
    let parts = Parts { ctx: ctx.clone(), cq, channel, control, texts, size, local, netdev };
    let sges = [parts.control.sge(IN, ADVERT)];
    qp.post_recv(&[RecvWr { wr_id: RECV, sges: &sges }])?;
    Ok(Prepared { qp, parts })
}

impl Prepared {
    /// Adds the connection.
    pub(super) fn connect(
        self,
        connect: impl FnOnce(PreparedQp) -> Result<Connection, VerbsError>,
    ) -> Result<RpingGame, VerbsError> {
        let Self { qp, parts } = self;
        let connection = connect(qp)?;
        let (size, local, netdev) = (parts.size, parts.local, parts.netdev);
        let (rounds, time, adverts) = (0, Duration::ZERO, 0);
        Ok(RpingGame { connection, rounds, time, size, local, netdev, parts, adverts, gone: false })
    }
}

/// A peer's buffer.
struct Advert {
    address: u64,
    rkey: Key,
    len: u32,
}

impl RpingGame {
    /// Plays the client.
    pub(super) fn ask(&mut self, count: u64, verbose: bool, validate: bool, out: Output) -> Result {
        let start = Instant::now();
        let asked = self.ask_rounds(count, verbose, validate, out);
        self.time = start.elapsed();
        asked
    }

    fn ask_rounds(&mut self, count: u64, verbose: bool, validate: bool, out: Output) -> Result {
        let size = self.size as usize;
        while count == 0 || self.rounds < count {
            let text = text(self.rounds, size);
            self.parts.texts.write(0, &text);
            self.advertise(0)?;
            self.receive_advert()?;
            self.advertise(size)?;
            self.receive_advert()?;
            let back = self.parts.texts.to_vec(size, size);
            if validate && back != text {
                let at = back.iter().zip(&text).position(|(a, b)| a != b).unwrap_or(0);
                let what =
                    format!("round {}: what came back differs from byte {at} on", self.rounds);
                return Err(Failure::Of(Kind::Data, what));
            }
            if verbose {
                out.line(format_args!("ping data: {}", printable(&back)));
            }
            self.rounds += 1;
        }
        Ok(())
    }

    /// Plays the server, until the client disconnects.
    pub(super) fn serve(&mut self, verbose: bool, out: Output) -> Result {
        let start = Instant::now();
        let served = self.serve_rounds(verbose, out);
        self.time = start.elapsed();
        served
    }

    fn serve_rounds(&mut self, verbose: bool, out: Output) -> Result {
        loop {
            let advert = match self.receive_advert() {
                Ok(advert) => advert,
                // The client may leave between two rounds.
                Err(_) if self.gone => break,
                Err(failure) => return Err(failure),
            };
            let len = advert.len as usize;
            if !(1..=self.parts.texts.len() / 2).contains(&len) {
                return Err(Failure::Failed(format!(
                    "the client's text has {len} bytes: give it -S {SIZE_MAX} or less"
                )));
            }
            self.size = advert.len;
            let read = SendOp::Read { remote: advert.address, rkey: advert.rkey };
            self.rdma(read, self.parts.texts.sge(0, len))?;
            let text = self.parts.texts.to_vec(0, len);
            if verbose {
                out.line(format_args!("server ping data: {}", printable(&text)));
            }
            self.send()?;
            let advert = self.receive_advert()?;
            // As rping does: up to and including the zero that ends the text.
            let back = text.iter().position(|byte| *byte == 0).map_or(len, |at| at + 1);
            let write = SendOp::Write { remote: advert.address, rkey: advert.rkey, imm: None };
            self.rdma(write, self.parts.texts.sge(0, back.min(advert.len as usize)))?;
            // The client's request to disconnect may overtake its acknowledgement of the last SEND.
            match self.send() {
                Err(_) if self.gone => {}
                sent => sent?,
            }
            self.rounds += 1;
            if self.gone {
                break;
            }
        }
        Ok(())
    }

    /// Sends the peer an advert of the text at `offset`.
    fn advertise(&mut self, offset: usize) -> Result {
        let texts = &self.parts.texts;
        let mut advert = [0; ADVERT];
        advert[..8].copy_from_slice(&(texts.address() + offset as u64).to_be_bytes());
        advert[8..12].copy_from_slice(&texts.rkey().0.to_be_bytes());
        advert[12..].copy_from_slice(&self.size.to_be_bytes());
        self.parts.control.write(OUT, &advert);
        self.send()
    }

    /// Sends the advert in the control region.
    fn send(&mut self) -> Result {
        let sge = self.parts.control.sge(OUT, ADVERT);
        self.post(SEND, SendOp::Send { imm: None }, sge)
    }

    /// Posts a READ or WRITE and waits for its completion.
    fn rdma(&mut self, op: SendOp, sge: Sge) -> Result {
        self.post(RDMA, op, sge)
    }

    /// Posts a request and waits for its completion.
    fn post(&mut self, wr_id: u64, op: SendOp, sge: Sge) -> Result {
        let sges = [sge];
        let data = SendData::Sges(&sges);
        let wr = SendWr::new(op, data).wr_id(wr_id);
        self.connection.post_send(&[wr]).map_err(VerbsError::from)?;
        while self.complete()?.wr_id != wr_id {}
        Ok(())
    }

    /// Waits for the peer's next advert, and posts its receive again.
    fn receive_advert(&mut self) -> Result<Advert> {
        while self.adverts == 0 {
            self.complete()?;
        }
        self.adverts -= 1;
        let bytes = self.parts.control.to_vec(IN, ADVERT);
        let sges = [self.parts.control.sge(IN, ADVERT)];
        let receive = RecvWr { wr_id: RECV, sges: &sges };
        self.connection.post_recv(&[receive]).map_err(VerbsError::from)?;
        let (address, rest) = bytes.split_first_chunk().expect("16 bytes");
        let (rkey, len) = rest.split_first_chunk().expect("8 bytes");
        Ok(Advert {
            address: u64::from_be_bytes(*address),
            rkey: Key(u32::from_be_bytes(*rkey)),
            len: u32::from_be_bytes(*len.first_chunk().expect("4 bytes")),
        })
    }

    /// The next completion.
    fn complete(&mut self) -> Result<Wc> {
        let wc = self.next()?;
        if wc.status != WcStatus::Success {
            return Err(self.failed(wc.status));
        }
        if wc.opcode == WcOpcode::Recv {
            if wc.byte_len as usize != ADVERT {
                return Err(Failure::Failed(format!(
                    "the peer sent {} bytes, not {ADVERT}: is it rping?",
                    wc.byte_len
                )));
            }
            self.adverts += 1;
        }
        Ok(wc)
    }

    fn failed(&mut self, status: WcStatus) -> Failure {
        let (ctx, peer) = (&self.parts.ctx, self.connection.peer());
        let mtu = self.connection.qp().query().1.path_mtu;
        let unanswered = diagnosis::unanswered(self.size as usize, mtu, self.rounds > 0);
        if status != WcStatus::WrFlushErr {
            let failure = diagnosis::of_status(ctx, peer.ip(), status, unanswered);
            return failure.told(|why| format!("peer {peer}, round {}: {why}", self.rounds));
        }
        self.gone = true;
        // The connection manager reports the end, perhaps a moment later.
        let _ = self.connection.wait_disconnected(Duration::from_secs(1));
        let why = diagnosis::of_parting(ctx, peer.ip(), unanswered);
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        Failure::Of(Kind::Peer, format!("{peer} has ended the connection{why}"))
    }

    /// Polls for a completion, and sleeps while there is none.
    fn next(&self) -> Result<Wc> {
        let Parts { cq, channel, .. } = &self.parts;
        loop {
            ending::check_signal()?;
            if let Some(wc) = cq.poll_one()? {
                return Ok(wc);
            }
            cq.req_notify(false)?;
            if let Some(wc) = cq.poll_one()? {
                return Ok(wc);
            }
            match channel.wait_event(Some(ending::LOOK)) {
                Ok(_) | Err(VerbsError::TimedOut) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The text of a round: its number, then letters from `A` to `z`, and a zero. Each round begins one
/// letter later.
fn text(round: u64, size: usize) -> Vec<u8> {
    let letters = (b'A'..=b'z').cycle().skip((round % 58) as usize);
    let mut text = format!("rdma-ping-{round}: ").into_bytes();
    text.truncate(size - 1);
    text.extend(letters.take(size - 1 - text.len()));
    text.push(0);
    text
}

/// A peer's text with control characters replaced, safe for a terminal.
fn printable(text: &[u8]) -> String {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of `rping -C 2 -S 64 -v` of librdmacm.
    #[test]
    fn texts_are_those_of_rping() {
        let shown = |round| printable(&text(round, 64));
        assert_eq!(shown(0), "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr");
        assert_eq!(shown(1), "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs");
        assert_eq!(shown(58)[..15], *"rdma-ping-58: A");
        assert_eq!(text(u64::MAX, SIZE_MIN as usize).len(), SIZE_MIN as usize);
    }
}
