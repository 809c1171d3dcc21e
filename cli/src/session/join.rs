//! Connects the queue pairs of two processes: with endpoints that they swap, or through the
//! connection manager.
//!
//! Through the connection manager each queue pair has its own connection. The private data names
//! the session, the index of the queue pair, and the region that the peer may access:
//!
//! | bytes | |
//! |---|---|
//! | 0..8 | a number that the client has drawn and sent over the exchange |
//! | 8..12 | index of the queue pair |
//! | 12..20, 20..28, 28..32 | the region: address, length, key; zeros if there is none |

use std::ops::Deref;
use std::time::{Duration, Instant};

use rocinante::cm::{self, Connection, Params, Request};
use rocinante::exchange::Hello;
use rocinante::verbs::{Destination, Mtu, PeerPath, Qpn};
use rocinante::{Ah, ConnectOptions, Endpoint, Pd, PreparedQp, Qp, RemoteSlice};

use super::door::{Door, turn_away};
use super::{LINE_PATIENCE, Session, check_mtu};
use crate::output::Result;

/// Interval at which a side that waits for a request checks whether the peer is still there.
const LOOK: Duration = Duration::from_millis(200);

/// A connected queue pair.
#[derive(Debug)]
pub enum Joined {
    /// Connected by swapped endpoints, or for datagrams.
    Plain(Box<Qp>),
    /// Connected by the connection manager, which also disconnects it.
    Managed(Box<Connection>),
}

impl Deref for Joined {
    type Target = Qp;

    fn deref(&self) -> &Qp {
        match self {
            Self::Plain(qp) => qp,
            Self::Managed(connection) => connection.qp(),
        }
    }
}

/// The Q_Key of both sides' datagrams.
pub const QKEY: u32 = 0x1111_1111;

/// The destination of datagrams.
#[derive(Debug)]
pub struct Target {
    ah: Ah,
    qpn: Qpn,
}

impl Target {
    /// For work requests.
    #[must_use]
    pub fn to(&self) -> Destination {
        self.ah.to(self.qpn, QKEY)
    }
}

/// Connected queue pairs, and the peer's data.
#[derive(Debug)]
pub struct Theirs {
    /// In the order of the prepared queue pairs.
    pub qps: Vec<Joined>,
    /// The endpoints of the first queue pair: this side's, and the peer's.
    pub first: [Endpoint; 2],
    /// The peer's region, where this side has one.
    pub region: Option<RemoteSlice>,
}

impl Session {
    /// Makes queue pairs for datagrams ready, and swaps endpoints and regions. The peer must have
    /// the same number of queue pairs, and a region of the same length. Returns also the
    /// destination of each queue pair's datagrams.
    pub fn join_datagrams(
        &mut self,
        pd: &Pd,
        qps: Vec<PreparedQp>,
        region: Option<RemoteSlice>,
        traffic_class: u8,
    ) -> Result<(Theirs, Vec<Target>)> {
        let endpoints: Vec<_> = qps.iter().map(PreparedQp::endpoint).collect();
        let own = endpoints[0];
        let hello = Hello { endpoints, regions: region.into_iter().collect(), note: String::new() };
        let theirs = self.swap(&hello)?;
        let gid_index = self.gid_index();
        let (mut ready, mut targets) = (Vec::with_capacity(qps.len()), Vec::new());
        for (qp, peer) in qps.into_iter().zip(&theirs.endpoints) {
            let path = PeerPath::to(peer).traffic_class(traffic_class);
            let ah = pd.create_ah(&path.sgid_index(gid_index)).map_err(|why| self.failed(why))?;
            targets.push(Target { ah, qpn: peer.qpn });
            let qp = qp.ready().map_err(|refused| self.failed(refused.error))?;
            ready.push(Joined::Plain(Box::new(qp)));
        }
        let (first, region) = ([own, theirs.endpoints[0]], theirs.regions.first().copied());
        Ok((Theirs { qps: ready, first, region }, targets))
    }

    /// Connects queue pairs to the peer's, and swaps regions. The peer must have the same number of
    /// queue pairs, and a region of the same length. Error: the peer is gone, says something else,
    /// or has other queue pairs or regions; or the path MTU does not fit.
    pub fn join(
        &mut self,
        qps: Vec<PreparedQp>,
        region: Option<RemoteSlice>,
        options: &ConnectOptions,
    ) -> Result<Theirs> {
        if self.is_managed() {
            self.join_by_cm(qps, region, options)
        } else {
            self.join_by_swap(qps, region, options)
        }
    }

    fn join_by_swap(
        &mut self,
        qps: Vec<PreparedQp>,
        region: Option<RemoteSlice>,
        options: &ConnectOptions,
    ) -> Result<Theirs> {
        let endpoints: Vec<_> = qps.iter().map(PreparedQp::endpoint).collect();
        let own = endpoints[0];
        let hello = Hello { endpoints, regions: region.into_iter().collect(), note: String::new() };
        let theirs = self.swap(&hello)?;
        let pairs = qps.into_iter().zip(&theirs.endpoints);
        let qps = pairs.map(|(qp, peer)| self.connect_qp(qp, peer, options));
        let qps = qps.map(|qp| qp.map(|qp| Joined::Plain(Box::new(qp))));
        let first = [own, theirs.endpoints[0]];
        Ok(Theirs {
            qps: qps.collect::<Result<_, _>>()?,
            first,
            region: theirs.regions.first().copied(),
        })
    }

    fn join_by_cm(
        &mut self,
        qps: Vec<PreparedQp>,
        region: Option<RemoteSlice>,
        options: &ConnectOptions,
    ) -> Result<Theirs> {
        self.enter("connecting the queue pairs");
        let own = qps[0].endpoint();
        let agreed = self.exchange.path_mtu().unwrap_or(Mtu::Mtu256);
        check_mtu(&self.ctx, agreed, options).map_err(|why| self.failed(why))?;
        let options = options.mtu(options.mtu.or(Some(agreed)));
        let session = self.agree_on_number(qps.len())?;
        let (mut joined, mut theirs) = (Vec::with_capacity(qps.len()), None);
        for (index, qp) in (0..).zip(qps) {
            let ticket = Ticket { session, index, region };
            let params = Params::default().options(options).private_data(&ticket.bytes());
            let connection = if self.door.is_some() {
                self.accept(qp, ticket, &params)?
            } else {
                let asked = cm::connect(qp, self.exchange.peer(), &params, LINE_PATIENCE);
                asked.map_err(|error| self.failed(error))?
            };
            let announced = Ticket::parse(connection.private_data())
                .and_then(|announced| announced.suits(&ticket));
            theirs = announced.map_err(|why| self.failed(why))?;
            joined.push(Joined::Managed(Box::new(connection)));
        }
        let attr = joined[0].query().1;
        let first = [
            own.psn(attr.sq_psn.unwrap_or_default()),
            Endpoint::new(
                self.peer().ip(),
                attr.dest_qpn.unwrap_or_default(),
                attr.rq_psn.unwrap_or_default(),
                agreed,
            ),
        ];
        Ok(Theirs { qps: joined, first, region: theirs })
    }

    /// Agrees on the number that names the connections to come. The client draws it, and sends it
    /// with their count.
    fn agree_on_number(&mut self, count: usize) -> Result<u64> {
        if self.door.is_none() {
            let number = draw();
            self.exchange.say(&format!("join {number:016x} {count}"))?;
            return Ok(number);
        }
        let line = self.exchange.hear()?;
        let mut words = line.split(' ');
        let number = match (words.next(), words.next(), words.next()) {
            (Some("join"), Some(number), Some(theirs)) if theirs == count.to_string() => {
                u64::from_str_radix(number, 16).ok()
            }
            _ => None,
        };
        number.ok_or_else(|| {
            self.failed(format_args!(
                "it does not want to connect {count} queue pairs: use the same version on both sides"
            ))
        })
    }

    /// Waits for the request with this ticket, and accepts it.
    fn accept(&mut self, qp: PreparedQp, ticket: Ticket, params: &Params) -> Result<Connection> {
        let deadline = Instant::now() + LINE_PATIENCE;
        loop {
            let Some(door) = &self.door else {
                return Err(self.failed("this side has stopped listening: start both sides again"));
            };
            if let Some(request) = wanted(door, &ticket) {
                let connection = request.accept(qp, params).and_then(|it| it.wait(LINE_PATIENCE));
                return connection.map_err(|error| self.failed(error));
            }
            if let Some(line) = self.exchange.try_hear()? {
                return Err(self.failed(format_args!("it says {line:?} instead of connecting")));
            }
            if Instant::now() > deadline {
                let what = "it does not connect its queue pairs: does its program hang?";
                return Err(self.failed(what));
            }
        }
    }
}

/// The next request, if it has this ticket. Rejects it otherwise.
fn wanted(door: &Door, ticket: &Ticket) -> Option<Request> {
    let request = door.request(LOOK)?;
    match Ticket::parse(request.private_data()) {
        Ok(theirs) if (theirs.session, theirs.index) == (ticket.session, ticket.index) => {
            Some(request)
        }
        _ => {
            turn_away(request);
            None
        }
    }
}

/// The contents of the private data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ticket {
    session: u64,
    index: u32,
    region: Option<RemoteSlice>,
}

impl Ticket {
    fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.session.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.index.to_be_bytes());
        if let Some(region) = &self.region {
            bytes[12..].copy_from_slice(&region.to_bytes());
        }
        bytes
    }

    fn parse(private: &[u8]) -> Result<Self, String> {
        let read = || {
            let (session, rest) = private.split_first_chunk()?;
            let (index, rest) = rest.split_first_chunk()?;
            let region = RemoteSlice::from_bytes(rest)?;
            Some(Self {
                session: u64::from_be_bytes(*session),
                index: u32::from_be_bytes(*index),
                region: (region.len > 0).then_some(region),
            })
        };
        read().ok_or_else(|| "its private data is too short".to_owned())
    }

    /// The peer's region, if its ticket matches ours.
    fn suits(&self, ours: &Self) -> Result<Option<RemoteSlice>, String> {
        if (self.session, self.index) != (ours.session, ours.index) {
            return Err("it accepts as if for another connection".to_owned());
        }
        if self.region.map(|region| region.len) != ours.region.map(|region| region.len) {
            let why = "its region has another length than this side's: use the same version on both sides";
            return Err(why.to_owned());
        }
        Ok(self.region)
    }
}

/// A random number, unique enough between a client and its server.
fn draw() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante::verbs::Key;

    #[test]
    fn tickets_are_read_as_they_are_written() {
        let region =
            RemoteSlice { address: 0x0102_0304_0506_0708, len: 9 << 33, rkey: Key(0xa0b0_c0d0) };
        for region in [None, Some(region)] {
            let ticket = Ticket { session: 0xfeed_face_dead_beef, index: 0x0a0b_0c0d, region };
            let mut private = ticket.bytes().to_vec();
            private.resize(56, 0);
            assert_eq!(Ticket::parse(&private), Ok(ticket));
            assert_eq!(ticket.suits(&ticket), Ok(region));
            let other = Ticket { index: 7, ..ticket };
            assert!(other.suits(&ticket).is_err());
        }
        assert!(Ticket::parse(&[0; 31]).is_err());
        let ours = Ticket { session: 1, index: 2, region: None };
        assert!(Ticket { region: Some(region), ..ours }.suits(&ours).is_err());
    }
}
