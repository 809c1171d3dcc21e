//! Any message of the communication manager.

use super::super::mad::{MAD_HEADER_LEN, MAD_LEN, MadBytes, MadError, MadHeader};
use super::answer::{Apr, Drep, Dreq, Lap, Mra, Rej, Rtu};
use super::connect::{Rep, Req};
use super::field::Data;
use super::sidr::{SidrRep, SidrReq};

/// A message of the communication manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmMessage<'a> {
    /// Asks for a connection.
    Req(Req<'a>),
    /// The answer will take its time.
    Mra(Mra<'a>),
    /// No connection.
    Rej(Rej<'a>),
    /// Accepts a connection.
    Rep(Rep<'a>),
    /// The connection is ready.
    Rtu(Rtu<'a>),
    /// Ends a connection.
    Dreq(Dreq<'a>),
    /// The connection has ended.
    Drep(Drep<'a>),
    /// Asks for the queue pair of a datagram service.
    SidrReq(SidrReq<'a>),
    /// The queue pair of a datagram service.
    SidrRep(SidrRep<'a>),
    /// Asks for an alternate path.
    Lap(Lap),
    /// The result for an alternate path.
    Apr(Apr),
}

impl<'a> CmMessage<'a> {
    /// Reads a management datagram.
    ///
    /// # Errors
    /// [`MadError`], if it is not a message of the communication manager. The values of its fields
    /// are not checked.
    pub fn parse(bytes: &'a [u8]) -> Result<(MadHeader, Self), MadError> {
        let Ok(bytes) = <&MadBytes>::try_from(bytes) else {
            return Err(MadError::Length(bytes.len()));
        };
        let (header, data) = bytes.split_first_chunk::<MAD_HEADER_LEN>().expect("shorter");
        let header = MadHeader::read(header);
        header.check_cm()?;
        let data: &Data = data.first_chunk().expect("the rest");
        let message = match header.attribute {
            0x10 => Self::Req(Req::read(data)),
            0x11 => Self::Mra(Mra::read(data)),
            0x12 => Self::Rej(Rej::read(data)),
            0x13 => Self::Rep(Rep::read(data)),
            0x14 => Self::Rtu(Rtu::read(data)),
            0x15 => Self::Dreq(Dreq::read(data)),
            0x16 => Self::Drep(Drep::read(data)),
            0x17 => Self::SidrReq(SidrReq::read(data)),
            0x18 => Self::SidrRep(SidrRep::read(data)),
            0x19 => Self::Lap(Lap::read(data)),
            0x1a => Self::Apr(Apr::read(data)),
            other => return Err(MadError::Attribute(other)),
        };
        Ok((header, message))
    }

    /// The attribute id.
    #[must_use]
    pub const fn attribute(&self) -> u16 {
        match self {
            Self::Req(_) => 0x10,
            Self::Mra(_) => 0x11,
            Self::Rej(_) => 0x12,
            Self::Rep(_) => 0x13,
            Self::Rtu(_) => 0x14,
            Self::Dreq(_) => 0x15,
            Self::Drep(_) => 0x16,
            Self::SidrReq(_) => 0x17,
            Self::SidrRep(_) => 0x18,
            Self::Lap(_) => 0x19,
            Self::Apr(_) => 0x1a,
        }
    }

    /// The management datagram with this transaction id. Private data that is too long is
    /// truncated.
    #[must_use]
    pub fn emit(&self, tid: u64) -> MadBytes {
        let mut bytes = [0; MAD_LEN];
        bytes[..MAD_HEADER_LEN].copy_from_slice(&MadHeader::cm(self.attribute(), tid).bytes());
        let data: &mut Data = bytes.last_chunk_mut().expect("longer");
        match self {
            Self::Req(message) => message.write(data),
            Self::Mra(message) => message.write(data),
            Self::Rej(message) => message.write(data),
            Self::Rep(message) => message.write(data),
            Self::Rtu(message) => message.write(data),
            Self::Dreq(message) => message.write(data),
            Self::Drep(message) => message.write(data),
            Self::SidrReq(message) => message.write(data),
            Self::SidrRep(message) => message.write(data),
            Self::Lap(message) => message.write(data),
            Self::Apr(message) => message.write(data),
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::field::CommId;
    use super::*;

    #[test]
    fn what_is_not_a_message_says_why() {
        assert_eq!(CmMessage::parse(&[0; 255]), Err(MadError::Length(255)));
        let rtu = Rtu { local: CommId(1), remote: CommId(2), private: b"" };
        let mut bytes = CmMessage::Rtu(rtu).emit(3);
        bytes[17] = 0x1b;
        assert_eq!(CmMessage::parse(&bytes), Err(MadError::Attribute(0x1b)));
        bytes[16] = 1;
        assert_eq!(CmMessage::parse(&bytes), Err(MadError::Attribute(0x11b)));
    }

    #[test]
    fn private_data_that_is_too_long_is_cut_off() {
        let long = [7; 400];
        let bytes =
            CmMessage::Rtu(Rtu { local: CommId(1), remote: CommId(2), private: &long }).emit(3);
        let (header, message) = CmMessage::parse(&bytes).unwrap();
        assert_eq!(header.tid, 3);
        let CmMessage::Rtu(rtu) = message else { panic!("{message:?}") };
        assert_eq!(rtu.private, &long[..Rtu::PRIVATE_LEN]);
    }
}
