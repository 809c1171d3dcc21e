//! Known departures of Soft-RoCE from the specification. `tests/interop/README.md` has a row for
//! each.

/// A departure of Soft-RoCE.
#[derive(Debug, PartialEq, Eq)]
pub struct Departure {
    /// The subject: the first cell of its row.
    pub what: &'static str,
    /// The behaviour of Soft-RoCE: the second cell.
    pub does: &'static str,
}

/// Gives each departure a name, and lists them all.
macro_rules! departures {
    ($($name:ident: $what:literal, $does:literal;)*) => {
        $(pub(crate) static $name: Departure = Departure { what: $what, does: $does };)*

        /// All of them.
        pub static DEPARTURES: &[&Departure] = &[$(&$name),*];
    };
}

departures! {
    UNASKED_ACK:
        "a duplicate SEND or WRITE that does not ask for an acknowledgement",
        "is acknowledged";
    ACK_OF_AN_ATOMIC:
        "a duplicate SEND or WRITE, behind which an atomic was answered",
        "is acknowledged with the PSN of the atomic";
    PARTIAL_READ_IN_THE_MIDDLE:
        "a READ that is repeated from a later packet on",
        "is answered by a MIDDLE or LAST first";
    READ_AGAIN_BEFORE_THE_PART:
        "a READ of which a part was repeated, repeated from before that part on",
        "is dropped: the record has become the part's";
    DUPLICATE_READ_OF_A_DEAD_KEY:
        "a duplicate READ of a region that is gone",
        "NAK \"access error\", and the queue pair breaks";
    DUPLICATE_READ_OF_NOTHING:
        "a duplicate READ of no bytes",
        "is dropped, unless its key is 0";
    WRITE_OF_NOTHING_WITH_BYTES:
        "a WRITE of no bytes that has some",
        "NAK \"access error\"";
    PAYLOAD_OF_A_READ:
        "a READ request or an atomic with a payload",
        "is executed, the payload ignored";
    SEQUENCE_NAK_BEHIND_RNR:
        "a packet behind one that got an RNR NAK",
        "NAK \"sequence error\"";
    RECEIVE_TOO_SMALL:
        "SEND longer than the receive",
        "NAK \"remote operational error\" (0x63); its own receive ends in `LOC_QP_OP_ERR`";
    RECEIVE_INTO_NO_MEMORY:
        "a receive into memory that may not be written",
        "NAK \"remote operational error\"; its own receive ends in `LOC_QP_OP_ERR`";
    INVALID_AETH:
        "an acknowledgement with a reserved syndrome",
        "the request ends, in `REM_OP_ERR` or in success, and the queue pair breaks";
    SECOND_SEQUENCE_NAK:
        "a second sequence NAK, without an ACK between them",
        "is not heard: the timeout has to make up for the loss";
    ACK_INSTEAD_OF_A_RESPONSE:
        "an ACK with the PSN of a READ whose last response was lost",
        "completes the READ without its data";
    RESPONSE_OF_THE_WRONG_LENGTH:
        "a READ response of the wrong length",
        "is placed, and what is missing waited for; beyond the end of the READ it ends in `LOC_PROT_ERR`";
    RESPONSE_OF_ANOTHER_KIND:
        "an atomic's response to a READ, and the other way round",
        "the READ ends in success without its data, the atomic in `FATAL_ERR`; the queue pair breaks";
    RESPONSE_WITH_A_NAK:
        "a READ response with a NAK in its header",
        "the READ ends in success without its data, and the queue pair breaks";
    RESET_WITH_REQUESTS:
        "RESET while requests are outstanding",
        "connected again, it first sends an empty WRITE for each of them";
    SQD_TO_RTS:
        "SQD to RTS",
        "does not always go on with what was posted meanwhile, until something else is posted";
    ACK_WHILE_REPEATED:
        "an ACK of a SEND or WRITE of several packets that is being sent again",
        "does not complete it. If it is the last ACK, nothing does: it is neither repeated nor given up";
    GHOST_ACK:
        "an ACK of a PSN that was not sent",
        "completes the SENDs and WRITEs that are outstanding";
}
