//! Messages as SENDs of a queue pair that the connection manager connected. Neither side sends two
//! messages in a row.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante::cm::{self, CmFailure, Connection, Params, RejReason, Request, SidrStatus};
use rocinante::verbs::{Mtu, SendData, SendOp, Sge};
use rocinante::{
    Access, ConnectOptions, Context, Cq, Mr, PreparedQp, RecvWr, SendWr, VerbsError, Wc, WcStatus,
};

/// Largest message in bytes.
const SLOT: usize = 256;
/// Number of posted receives. A peer that sends more messages has to wait until some are read.
const SLOTS: usize = 4;
/// Work request ID of the one SEND in flight. The ID of a receive is the number of its slot.
const SENT: u64 = u64::MAX;
/// Interval at which a client asks a server that is not there yet.
const PAUSE: Duration = Duration::from_millis(20);

/// A connected queue pair for messages.
#[derive(Debug)]
pub struct Queue {
    connection: Arc<Connection>,
    cq: Cq,
    /// The slots of the receives, then the slot of the send.
    memory: Mr,
    /// Messages that arrived and were not read: slot, and length in bytes.
    came: VecDeque<(u64, usize)>,
    /// Status of the last SEND, if it has completed.
    sent: Option<WcStatus>,
    /// How the connection ended.
    ended: Option<WcStatus>,
}

impl Queue {
    /// Asks for a connection.
    ///
    /// # Errors
    /// As [`cm::connect`].
    pub fn connect(
        ctx: &Context,
        server: SocketAddr,
        patience: Duration,
    ) -> Result<Self, VerbsError> {
        let QueueParts { qp, cq, memory } = QueueParts::new(ctx, 0)?;
        let params = Params::default().options(options());
        Ok(Self::over(cm::connect(qp, server, &params, patience)?, cq, memory))
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// As [`Request::accept`], and [`cm::Connecting::wait`].
    pub fn accept(ctx: &Context, request: Request, patience: Duration) -> Result<Self, VerbsError> {
        let QueueParts { qp, cq, memory } = QueueParts::new(ctx, gid_index(ctx, request.local()))?;
        let params = Params::default().options(options());
        Ok(Self::over(request.accept(qp, &params)?.wait(patience)?, cq, memory))
    }

    fn over(connection: Connection, cq: Cq, memory: Mr) -> Self {
        let (connection, came) = (Arc::new(connection), VecDeque::with_capacity(SLOTS));
        Self { connection, cq, memory, came, sent: None, ended: None }
    }

    /// The connection.
    #[must_use]
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// The local address.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        self.connection.endpoint().address
    }

    /// Sends a message and waits until the peer acknowledges it.
    ///
    /// # Errors
    /// `BrokenPipe` once the peer has ended the connection. `WouldBlock` if the message is not
    /// acknowledged until `deadline`. Another error if the peer does not answer any more.
    pub fn send(&mut self, message: &[u8], deadline: Instant) -> io::Result<()> {
        if message.len() > SLOT {
            return Err(ErrorKind::InvalidInput.into());
        }
        self.look()?;
        of(self.ended)?;
        self.memory.write(SLOTS * SLOT, message);
        let sges = [self.memory.sge(SLOTS * SLOT, message.len())];
        let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&sges));
        let wr = SendWr::new(op, data).wr_id(SENT);
        self.connection.post_send(&[wr]).map_err(io::Error::other)?;
        self.sent = None;
        loop {
            match self.sent {
                // The peer may end the connection after it received the last message, before this
                // side sees the completion.
                Some(WcStatus::Success) => return Ok(()),
                // The first failed request has the reason.
                Some(_) => return of(self.ended),
                None => self.wait(deadline)?,
            }
        }
    }

    /// The next message. Copies as much of it as fits `into`, and returns its whole length. `None`
    /// once the peer has ended the connection.
    ///
    /// # Errors
    /// `WouldBlock` if no message arrives until `deadline`. Another error if the connection broke.
    pub fn receive(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<Option<usize>> {
        while !self.is_ready()? {
            self.wait(deadline)?;
        }
        let Some((slot, len)) = self.came.pop_front() else {
            return match of(self.ended) {
                Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
                _ => Ok(None),
            };
        };
        let read = len.min(into.len());
        self.memory.read(slot as usize * SLOT, &mut into[..read]);
        // An ended connection takes no more receives, but its unread messages remain.
        if self.ended.is_none() {
            let receive = RecvWr { wr_id: slot, sges: &[place(&self.memory, slot)] };
            self.connection.post_recv(&[receive]).map_err(io::Error::other)?;
        }
        Ok(Some(len))
    }

    /// Whether a message is there, or none will ever come.
    ///
    /// # Errors
    /// The completion queue is broken.
    pub fn is_ready(&mut self) -> io::Result<bool> {
        self.look()?;
        Ok(!self.came.is_empty() || self.ended.is_some())
    }

    /// Takes all completions.
    fn look(&mut self) -> io::Result<()> {
        while let Some(wc) = self.cq.poll_one().map_err(io::Error::other)? {
            self.take(&wc);
        }
        Ok(())
    }

    /// Waits for a completion.
    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        match self.cq.wait_one(deadline.saturating_duration_since(Instant::now())) {
            Ok(wc) => {
                self.take(&wc);
                Ok(())
            }
            Err(VerbsError::TimedOut) => Err(ErrorKind::WouldBlock.into()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn take(&mut self, wc: &Wc) {
        if wc.wr_id == SENT {
            self.sent = Some(wc.status);
        }
        if wc.status != WcStatus::Success {
            // The first failure has the reason, the others are flushed.
            self.ended.get_or_insert(wc.status);
        } else if wc.wr_id != SENT {
            self.came.push_back((wc.wr_id, wc.byte_len as usize));
        }
    }
}

/// The I/O result for the end of a connection.
fn of(end: Option<WcStatus>) -> io::Result<()> {
    match end {
        None => Ok(()),
        Some(WcStatus::RetryExcErr) => Err(io::Error::new(
            ErrorKind::NotConnected,
            "it does not answer any more (RETRY_EXC_ERR): its program was killed, or the network between is cut",
        )),
        Some(WcStatus::LocLenErr) => Err(io::Error::other(format!(
            "it sent more than {SLOT} bytes at once, which is no message"
        ))),
        // When the connection manager or the queue pair ends, posted requests are flushed.
        Some(WcStatus::WrFlushErr) => Err(ErrorKind::BrokenPipe.into()),
        Some(status) => Err(io::Error::other(format!("the connection broke ({status})"))),
    }
}

/// A queue before it is connected.
struct QueueParts {
    qp: PreparedQp,
    cq: Cq,
    memory: Mr,
}

impl QueueParts {
    /// Creates the objects and posts the receives, so that the first message finds one.
    fn new(ctx: &Context, gid_index: usize) -> Result<Self, VerbsError> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(SLOTS as u32 + 1)?);
        let memory = pd.allocate((SLOTS + 1) * SLOT, Access::LOCAL_WRITE)?;
        let qp = pd.qp(&cq, &cq).max_send_wr(1).max_recv_wr(SLOTS as u32).sgid_index(gid_index);
        let qp = qp.build()?;
        for wr_id in 0..SLOTS as u64 {
            qp.post_recv(&[RecvWr { wr_id, sges: &[place(&memory, wr_id)] }])?;
        }
        Ok(Self { qp, cq, memory })
    }
}

fn place(memory: &Mr, slot: u64) -> Sge {
    memory.sge(slot as usize * SLOT, SLOT)
}

/// Every link carries this path MTU, and messages are short.
fn options() -> ConnectOptions {
    ConnectOptions::default().mtu(Some(Mtu::Mtu256))
}

/// The GID index of a local address.
#[must_use]
pub fn gid_index(ctx: &Context, local: IpAddr) -> usize {
    ctx.gids().iter().position(|gid| *gid == local).unwrap_or(0)
}

/// Calls `ask` again until a listener answers or `deadline` has passed.
///
/// # Errors
/// The last error of `ask`.
pub fn ask_again<T>(
    deadline: Instant,
    mut ask: impl FnMut() -> Result<T, VerbsError>,
) -> Result<T, VerbsError> {
    loop {
        let error = match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if !is_absent(&error) || Instant::now() >= deadline {
            return Err(error);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether the server does not listen, or does not listen yet.
fn is_absent(error: &VerbsError) -> bool {
    match error {
        VerbsError::Cm(CmFailure::Rejected { reason, .. }) => {
            *reason == RejReason::INVALID_SERVICE_ID
        }
        VerbsError::Cm(CmFailure::Unresolved { status }) => *status == SidrStatus::UNSUPPORTED,
        _ => false,
    }
}

/// Two connected ends over loopback, for tests: the client's, and the server's.
#[cfg(test)]
pub(crate) mod pair {
    use super::*;
    use rocinante::OpenOptions;
    use rocinante::device::Backend;

    pub(crate) fn connected() -> [Queue; 2] {
        const PATIENCE: Duration = Duration::from_secs(20);
        let (here, there) = rocinante::doc::addresses();
        let open = |address| OpenOptions::new().netdev(Backend::Udp).open(address).unwrap();
        let (server, client) = (open(there), open(here));
        let place = SocketAddr::new(there, 18515);
        let listener = cm::Listener::bind(&server, place, 1).unwrap();
        let server = std::thread::spawn(move || {
            let request = listener.request(Some(PATIENCE)).unwrap();
            Queue::accept(&server, request, PATIENCE).unwrap()
        });
        let client = Queue::connect(&client, place, PATIENCE).unwrap();
        [client, server.join().unwrap()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_for_a_message_is_named() {
        let [mut client, mut server] = pair::connected();
        let deadline = Instant::now() + Duration::from_secs(20);
        // `send` itself refuses such lengths.
        assert!(client.send(&[0; SLOT + 1], deadline).is_err());
        let sges = [client.memory.sge(0, SLOT + 1)];
        let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&sges));
        let wr = SendWr::new(op, data).wr_id(SENT);
        client.connection.post_send(&[wr]).unwrap();
        let why = server.receive(&mut [0; 16], deadline).unwrap_err().to_string();
        assert!(why.contains("more than 256 bytes"), "{why}");
    }

    /// A sender waits while its messages are not read, and no message is lost.
    #[test]
    fn messages_wait_for_their_reader() {
        let [mut client, mut server] = pair::connected();
        let deadline = Instant::now() + Duration::from_secs(20);
        let speaker = std::thread::spawn(move || {
            (0..50u8).for_each(|number| client.send(&[number; 3], deadline).unwrap());
            client
        });
        for number in 0..50u8 {
            let mut message = [0; 8];
            assert_eq!(server.receive(&mut message, deadline).unwrap(), Some(3));
            assert_eq!(message[..3], [number; 3]);
        }
        drop(speaker.join().unwrap());
        assert_eq!(server.receive(&mut [0; 8], deadline).unwrap(), None);
    }

    #[test]
    fn only_an_absent_server_is_asked_again() {
        let mut asked = 0;
        let absent = || VerbsError::Cm(CmFailure::Unresolved { status: SidrStatus::UNSUPPORTED });
        let deadline = Instant::now() + Duration::from_secs(20);
        let answer = ask_again(deadline, || {
            asked += 1;
            if asked < 3 { Err(absent()) } else { Ok(asked) }
        });
        assert_eq!(answer.unwrap(), 3);
        let ended = ask_again(deadline, || Err::<(), _>(VerbsError::Cm(CmFailure::Ended)));
        assert!(matches!(ended, Err(VerbsError::Cm(CmFailure::Ended))));
        assert!(ask_again(Instant::now(), || Err::<(), _>(absent())).is_err());
    }
}
