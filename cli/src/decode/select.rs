//! Which packets are printed, counted and written.

use std::net::IpAddr;

use super::flows::{FlowKey, Known};
use super::line::Decoded;

/// Options that choose packets. A packet must suit all of them.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Selection {
    /// Only packets to or from this queue pair (decimal, or 0x and hexadecimal), and the connection
    /// manager's messages about it
    #[arg(long, value_name = "N", value_parser = qpn)]
    pub qp: Option<u32>,
    /// Only packets from or to this address; given twice, only those between the two
    #[arg(long, value_name = "ADDR")]
    pub addr: Vec<IpAddr>,
    /// Only packets with this PSN, or with one of FIRST-LAST, which may wrap
    #[arg(long, value_name = "PSN", value_parser = psns)]
    pub psn: Option<PsnRange>,
}

/// PSNs from the first to the last, which may be behind the end of their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PsnRange {
    first: u32,
    last: u32,
}

impl PsnRange {
    const fn has(self, psn: u32) -> bool {
        if self.first <= self.last {
            self.first <= psn && psn <= self.last
        } else {
            self.first <= psn || psn <= self.last
        }
    }
}

impl Selection {
    /// Whether a packet is chosen.
    #[must_use]
    pub fn takes(&self, (src, dst): (IpAddr, IpAddr), packet: &Decoded<'_>, known: &Known) -> bool {
        let bth = packet.bth.as_ref();
        let qp = self.qp.is_none_or(|qpn| {
            bth.is_some_and(|bth| bth.dest_qpn.value() == qpn)
                || known.src_qpn == Some(qpn)
                || known.about.contains(&Some(qpn))
        });
        let psn = self.psn.is_none_or(|range| bth.is_some_and(|bth| range.has(bth.psn.value())));
        qp && psn && self.is_between(src, dst)
    }

    /// Whether a flow is chosen: by queue pair and addresses.
    #[must_use]
    pub fn takes_flow(&self, flow: &FlowKey, src_qpn: Option<u32>) -> bool {
        self.qp.is_none_or(|qpn| flow.qpn == qpn || src_qpn == Some(qpn))
            && self.is_between(flow.src, flow.dst)
    }

    fn is_between(&self, src: IpAddr, dst: IpAddr) -> bool {
        self.addr.iter().all(|address| *address == src || *address == dst)
    }
}

/// Parses 24 bits.
fn number(text: &str) -> Option<u32> {
    let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    value.filter(|value| *value <= 0xff_ffff)
}

pub(crate) fn qpn(text: &str) -> Result<u32, String> {
    number(text).ok_or_else(|| "a queue pair is 0 to 16777215, or 0x0 to 0xffffff".to_owned())
}

fn psns(text: &str) -> Result<PsnRange, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = number(first).zip(number(last)).map(|(first, last)| PsnRange { first, last });
    range.ok_or_else(|| "a PSN is 0 to 16777215, or 0x0 to 0xffffff; or two with a -".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!((qpn("17"), qpn("0x11"), qpn("0xFFFFFF")), (Ok(17), Ok(17), Ok(0xff_ffff)));
        for wrong in ["", "0x", "-1", "16777216", "0x1000000", "eleven"] {
            assert!(qpn(wrong).is_err() && psns(wrong).is_err(), "{wrong}");
        }
        assert_eq!(psns("0xfffffe-2"), Ok(PsnRange { first: 0xff_fffe, last: 2 }));
        assert_eq!(psns("7"), Ok(PsnRange { first: 7, last: 7 }));
    }
}
