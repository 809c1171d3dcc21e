//! The address of a queue pair in the format of rdma-core's ping-pongs: LID, number, first PSN and
//! GID, in hexadecimal, separated by colons, with a zero byte at the end.

use rocinante::Endpoint;

use crate::compat::gid;
use crate::compat::wire::{hex, printable};

/// Bytes of a message.
pub const LEN: usize = 52;
/// The client's message after it received the server's addresses.
pub const DONE: &[u8; 5] = b"done\0";

/// The address of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Its number: 24 bits; 0 where there is no such queue pair.
    pub qpn: u32,
    /// The first PSN that it sends: 24 bits.
    pub psn: u32,
    /// Its GID.
    pub gid: [u8; 16],
}

/// The messages for `ends`, padded with messages for absent queue pairs up to `count`.
#[must_use]
pub fn all(ends: &[Endpoint], count: usize) -> Vec<u8> {
    let mut messages = Vec::with_capacity(count * LEN);
    for end in ends {
        let (qpn, psn) = (end.qpn.value(), end.psn.value());
        messages.extend(Address { qpn, psn, gid: gid::of(end.address) }.message());
    }
    for _ in ends.len()..count {
        messages.extend(Address { qpn: 0, psn: 0, gid: [0; 16] }.message());
    }
    messages
}

impl Address {
    /// The message. Its LID is 0, because Ethernet has no LIDs.
    #[must_use]
    pub fn message(&self) -> [u8; LEN] {
        let Self { qpn, psn, gid } = self;
        let gid = u128::from_be_bytes(*gid);
        let text = format!("0000:{qpn:06x}:{psn:06x}:{gid:032x}\0");
        text.as_bytes().try_into().expect("numbers of 24 bits have six digits")
    }

    /// Reads a message.
    ///
    /// # Errors
    /// The bytes have another format.
    pub fn parse(message: &[u8; LEN]) -> Result<Self, String> {
        let wrong = |why: String| format!("{:?} is no address: {why}", printable(message));
        let end = message.iter().position(|byte| *byte == 0);
        let text = end.and_then(|end| std::str::from_utf8(&message[..end]).ok());
        let Some(text) = text else {
            return Err(wrong("it is no text that ends with a zero".to_owned()));
        };
        let fields: Vec<&str> = text.split(':').collect();
        let [lid, qpn, psn, gid] = fields[..] else {
            return Err(wrong(format!("it has {} fields instead of 4", fields.len())));
        };
        hex(lid, 0xffff).map_err(wrong)?;
        let number = |text| hex(text, 0xff_ffff).map_err(wrong).map(|number| number as u32);
        let gid = match gid.len() {
            32 if gid.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                u128::from_str_radix(gid, 16).expect("32 hexadecimal digits")
            }
            _ => return Err(wrong("its GID has not 32 hexadecimal digits".to_owned())),
        };
        Ok(Self { qpn: number(qpn)?, psn: number(psn)?, gid: gid.to_be_bytes() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_what_ibv_rc_pingpong_sends() {
        let gid = gid::of([10, 77, 0, 2].into());
        let address = Address { qpn: 0x11, psn: 0x5b_2c1f, gid };
        let message = address.message();
        assert_eq!(&message, b"0000:000011:5b2c1f:00000000000000000000ffff0a4d0002\0");
        assert_eq!(Address::parse(&message), Ok(address));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let good = *b"0000:000011:5b2c1f:00000000000000000000ffff0a4d0002\0";
        for (at, byte) in
            [(0, b'-'), (4, b'0'), (6, b' '), (18, b'1'), (30, b'x'), (51, b'0'), (20, 0), (0, 0)]
        {
            let mut message = good;
            message[at] = byte;
            assert!(Address::parse(&message).is_err(), "{}", printable(&message));
        }
    }

    #[test]
    fn there_are_as_many_messages_as_the_program_wants() {
        assert_eq!(all(&[], 256).len(), 256 * LEN);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), LEN)) {
            let message: [u8; LEN] = bytes.try_into().unwrap();
            if let Ok(address) = Address::parse(&message) {
                prop_assert_eq!(Address::parse(&address.message()), Ok(address));
            }
        }

        #[test]
        fn almost_messages_too(text in "[0-9a-f:]{0,51}") {
            let mut message = [0; LEN];
            message[..text.len()].copy_from_slice(text.as_bytes());
            if let Ok(address) = Address::parse(&message) {
                prop_assert_eq!(Address::parse(&address.message()), Ok(address));
            }
        }
    }
}
