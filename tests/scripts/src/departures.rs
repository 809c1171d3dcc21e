//! Known departures of Soft-RoCE from the specification. `tests/interop/README.md` has a row for
//! each.

/// A departure of Soft-RoCE.
#[derive(Debug, PartialEq, Eq)]
pub struct Departure {
    /// The subject: the first cell of its row. The second says what Soft-RoCE does.
    pub what: &'static str,
}

/// Gives each departure a name, and lists them all.
macro_rules! departures {
    ($($name:ident: $what:literal;)*) => {
        $(pub(crate) static $name: Departure = Departure { what: $what };)*

        /// All of them.
        pub static DEPARTURES: &[&Departure] = &[$(&$name),*];
    };
}

departures! {
    UNASKED_ACK: "a duplicate SEND or WRITE that does not ask for an acknowledgement";
    ACK_OF_AN_ATOMIC: "a duplicate SEND or WRITE, behind which an atomic was answered";
    PARTIAL_READ_IN_THE_MIDDLE: "a READ that is repeated from a later packet on";
    READ_AGAIN_BEFORE_THE_PART:
        "a READ of which a part was repeated, repeated from before that part on";
    DUPLICATE_READ_OF_A_DEAD_KEY: "a duplicate READ of a region that is gone";
    DUPLICATE_READ_OF_NOTHING: "a duplicate READ of no bytes";
    WRITE_OF_NOTHING_WITH_BYTES: "a WRITE of no bytes that has some";
    PAYLOAD_OF_A_READ: "a READ request or an atomic with a payload";
    SEQUENCE_NAK_BEHIND_RNR: "a packet behind one that got an RNR NAK";
    RECEIVE_TOO_SMALL: "SEND longer than the receive";
    RECEIVE_INTO_NO_MEMORY: "a receive into memory that may not be written";
    INVALID_AETH: "an acknowledgement with a reserved syndrome";
    SECOND_SEQUENCE_NAK: "a second sequence NAK, without an ACK between them";
    ACK_INSTEAD_OF_A_RESPONSE: "an ACK with the PSN of a READ whose last response was lost";
    RESPONSE_OF_THE_WRONG_LENGTH: "a READ response of the wrong length";
    RESPONSE_OF_ANOTHER_KIND: "an atomic's response to a READ, and the other way round";
    RESPONSE_WITH_A_NAK: "a READ response with a NAK in its header";
    RESET_WITH_REQUESTS: "RESET while requests are outstanding";
    SQD_TO_RTS: "SQD to RTS";
    ACK_WHILE_REPEATED: "an ACK of a SEND or WRITE of several packets that is being sent again";
    GHOST_ACK: "an ACK of a PSN that was not sent";
}
