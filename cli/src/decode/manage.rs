//! Messages of the connection manager: the packets to queue pair 1.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use rocinante_wire::cm::{
    CmMessage, IpHeader, PortSpace, ServiceId, Subject, Transport, code_to_ns,
};
use rocinante_wire::types::{Mtu, Qpn};
use serde::Serialize;

/// A message of the connection manager, as it is printed. Each kind has some of these fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Managed {
    /// The kind of message, such as `REQ`.
    pub message: &'static str,
    /// The transaction: the same in a message that is sent again.
    #[serde(serialize_with = "as_hex")]
    pub tid: u64,
    /// The sender's communication id.
    pub local_comm_id: Option<u32>,
    /// The receiver's communication id.
    pub remote_comm_id: Option<u32>,
    /// The number of a request for a datagram service.
    pub request_id: Option<u32>,
    /// The sender's queue pair.
    pub qpn: Option<u32>,
    /// The receiver's queue pair.
    pub remote_qpn: Option<u32>,
    /// The first PSN that the receiver is to send.
    pub psn: Option<u32>,
    service: Option<&'static str>,
    #[serde(serialize_with = "as_some_hex")]
    service_id: Option<u64>,
    port_space: Option<&'static str>,
    port: Option<u16>,
    mtu: Option<u32>,
    qkey: Option<u32>,
    responder_resources: Option<u8>,
    initiator_depth: Option<u8>,
    retry_count: Option<u8>,
    rnr_retry: Option<u8>,
    /// How long the answer may take.
    timeout_us: Option<u64>,
    /// The message that this one answers.
    subject: Option<&'static str>,
    /// The reason of a REJ, or the status of a SIDR_REP or APR.
    code: Option<u16>,
    /// The same in words.
    reason: Option<String>,
    /// Address and port of the program that asks, where `rdma_cm` sends them.
    from: Option<SocketAddr>,
    to: Option<IpAddr>,
    /// Bytes of the program's private data, up to the last one that is not 0.
    private_bytes: Option<usize>,
}

fn as_hex<S: serde::Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("0x{value:x}"))
}

fn as_some_hex<S: serde::Serializer>(value: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_hex(value, to),
        None => to.serialize_none(),
    }
}

impl Managed {
    /// Reads the payload of a packet to queue pair 1, if it is a message of the connection manager.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let (header, message) = CmMessage::parse(payload).ok()?;
        let mut it = Self { tid: header.tid, ..Self::default() };
        let ids = |it: &mut Self, local: u32, remote: u32| {
            (it.local_comm_id, it.remote_comm_id) = (Some(local), Some(remote));
        };
        match message {
            CmMessage::Req(req) => {
                it.message = "REQ";
                it.local_comm_id = Some(req.local.0);
                it.end(req.qpn, Some(req.psn.value()));
                it.service = Some(match req.transport {
                    Transport::Rc => "RC",
                    Transport::Uc => "UC",
                    Transport::Rd => "RD",
                    Transport::Extended => "XRC",
                });
                it.mtu = Mtu::ALL.into_iter().find(|mtu| mtu.code() == req.mtu).map(Mtu::bytes);
                it.reads(req.responder_resources, req.initiator_depth);
                (it.retry_count, it.rnr_retry) = (Some(req.retry_count), Some(req.rnr_retry));
                it.timeout_us = Some(code_to_ns(req.remote_response_timeout) / 1000);
                it.asks(req.service, req.private);
            }
            CmMessage::Mra(mra) => {
                it.message = "MRA";
                ids(&mut it, mra.local.0, mra.remote.0);
                it.subject = subject(mra.subject, "LAP");
                it.timeout_us = Some(code_to_ns(mra.service_timeout) / 1000);
                it.private(mra.private);
            }
            CmMessage::Rej(rej) => {
                it.message = "REJ";
                ids(&mut it, rej.local.0, rej.remote.0);
                it.subject = subject(rej.subject, "no message");
                (it.code, it.reason) = (Some(rej.reason.0), Some(rej.reason.to_string()));
                it.private(rej.private);
            }
            CmMessage::Rep(rep) => {
                it.message = "REP";
                ids(&mut it, rep.local.0, rep.remote.0);
                it.end(rep.qpn, Some(rep.psn.value()));
                it.reads(rep.responder_resources, rep.initiator_depth);
                it.rnr_retry = Some(rep.rnr_retry);
                it.private(rep.private);
            }
            CmMessage::Rtu(rtu) => {
                it.message = "RTU";
                ids(&mut it, rtu.local.0, rtu.remote.0);
                it.private(rtu.private);
            }
            CmMessage::Dreq(dreq) => {
                it.message = "DREQ";
                ids(&mut it, dreq.local.0, dreq.remote.0);
                it.remote_qpn = Some(dreq.remote_qpn.value());
                it.private(dreq.private);
            }
            CmMessage::Drep(drep) => {
                it.message = "DREP";
                ids(&mut it, drep.local.0, drep.remote.0);
                it.private(drep.private);
            }
            CmMessage::SidrReq(req) => {
                (it.message, it.request_id) = ("SIDR_REQ", Some(req.request));
                it.asks(req.service, req.private);
            }
            CmMessage::SidrRep(rep) => {
                (it.message, it.request_id) = ("SIDR_REP", Some(rep.request));
                it.end(rep.qpn, None);
                it.serves(rep.service);
                it.qkey = Some(rep.qkey);
                (it.code, it.reason) = (Some(rep.status.0.into()), Some(rep.status.to_string()));
                it.private(rep.private);
            }
            CmMessage::Lap(lap) => {
                it.message = "LAP";
                ids(&mut it, lap.local.0, lap.remote.0);
                it.remote_qpn = Some(lap.remote_qpn.value());
            }
            CmMessage::Apr(apr) => {
                it.message = "APR";
                ids(&mut it, apr.local.0, apr.remote.0);
                (it.code, it.reason) =
                    (Some(apr.status.into()), Some(format!("status {}", apr.status)));
            }
        }
        Some(it)
    }

    fn end(&mut self, qpn: Qpn, psn: Option<u32>) {
        (self.qpn, self.psn) = (Some(qpn.value()), psn);
    }

    fn reads(&mut self, responder_resources: u8, initiator_depth: u8) {
        self.responder_resources = Some(responder_resources);
        self.initiator_depth = Some(initiator_depth);
    }

    fn serves(&mut self, service: ServiceId) {
        self.service_id = Some(service.0);
        if let Some((space, port)) = service.port() {
            self.port = Some(port);
            self.port_space = Some(match space {
                PortSpace::Tcp => "tcp",
                PortSpace::Udp => "udp",
                PortSpace::Ib => "ib",
                PortSpace::IpOverIb => "ipoib",
            });
        }
    }

    /// The service that a request asks for, and the program that asks.
    fn asks(&mut self, service: ServiceId, private: &[u8]) {
        self.serves(service);
        let header = self.port.and_then(|_| IpHeader::parse(private).ok());
        match header {
            Some((header, rest)) => {
                (self.from, self.to) = (Some(header.src), Some(header.dst));
                self.private(rest);
            }
            None => self.private(private),
        }
    }

    fn private(&mut self, bytes: &[u8]) {
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        self.private_bytes = Some(used);
    }
}

fn subject(subject: Subject, other: &'static str) -> Option<&'static str> {
    Some(match subject {
        Subject::Req => "REQ",
        Subject::Rep => "REP",
        Subject::Other => other,
        Subject::Reserved => return None,
    })
}

impl fmt::Display for Managed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        if let Some(subject) = self.subject {
            write!(f, " of {subject}")?;
        }
        match (self.local_comm_id, self.remote_comm_id) {
            (Some(local), Some(remote)) => write!(f, " comm 0x{local:08x} to 0x{remote:08x}")?,
            (Some(local), None) => write!(f, " comm 0x{local:08x}")?,
            _ => {}
        }
        if let Some(request) = self.request_id {
            write!(f, " request 0x{request:08x}")?;
        }
        if let Some(service) = self.service {
            write!(f, " {service}")?;
        }
        for (name, number) in [("qp", self.qpn), ("remote qp", self.remote_qpn), ("psn", self.psn)]
        {
            if let Some(number) = number {
                write!(f, " {name} 0x{number:06x}")?;
            }
        }
        if let Some(qkey) = self.qkey {
            write!(f, " qkey 0x{qkey:08x}")?;
        }
        match (self.port_space, self.port, self.service_id) {
            (Some(space), Some(port), _) => write!(f, " port {space}/{port}")?,
            (_, _, Some(id)) => write!(f, " service 0x{id:x}")?,
            _ => {}
        }
        if let Some((from, to)) = self.from.zip(self.to) {
            write!(f, " from {from} to {to}")?;
        }
        if let Some(mtu) = self.mtu {
            write!(f, " mtu {mtu}")?;
        }
        if let Some((serves, asks)) = self.responder_resources.zip(self.initiator_depth) {
            write!(f, " reads {serves}/{asks}")?;
        }
        for (name, count) in [("retry", self.retry_count), ("rnr", self.rnr_retry)] {
            if let Some(count) = count {
                write!(f, " {name} {count}")?;
            }
        }
        if let Some(us) = self.timeout_us {
            write!(f, " timeout {} ms", us / 1000)?;
        }
        if let Some(reason) = &self.reason {
            write!(f, ": {reason},")?;
        }
        match self.private_bytes {
            Some(bytes) => write!(f, " private {bytes}"),
            None => Ok(()),
        }
    }
}
