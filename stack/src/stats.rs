//! Counters: why packets were dropped, why a queue pair does not send, and the work of the
//! transport. They only grow.

mod limit;

pub(crate) use self::limit::Hits;
pub use self::limit::{Limit, LimitsHit};

macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $( $(#[$doc:meta])* $field:ident, )* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $( $(#[$doc])* pub $field: u64, )*
        }

        impl $name {
            /// Adds the values of another set.
            pub fn add(&mut self, other: &Self) {
                $( self.$field += other.$field; )*
            }

            /// Name and value of each counter, in order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$( (stringify!($field), self.$field), )*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets that were dropped silently, by reason.
    Drops {
        /// Not a RoCEv2 packet: truncated, more padding than payload.
        malformed,
        /// A reserved opcode, or one of an unsupported transport.
        unknown_opcode,
        /// Transport header version other than 0.
        version,
        /// No such queue pair, or its state does not receive.
        unknown_qpn,
        /// The partition key does not match.
        pkey,
        /// The source is not the connected peer's address, or the destination is not ours. Also:
        /// sent to a group, but for one queue pair.
        wrong_source,
        /// The ICRC is wrong.
        icrc,
        /// An opcode of another service than the queue pair's.
        wrong_service,
        /// A response for a PSN that was never sent.
        ghost_response,
        /// An acknowledgement with a reserved syndrome.
        bad_syndrome,
        /// A duplicate READ or atomic without a matching responder resource, or its memory is no
        /// longer registered.
        stale_duplicate,
        /// A request after a gap, beyond the one that got a NAK.
        out_of_sequence,
        /// A packet of an unreliable connection's message; another packet of the message was lost
        /// or refused.
        incomplete,
        /// A message of an unreliable queue pair for which no receive was posted.
        no_receive,
        /// A message of an unreliable queue pair longer than its receive.
        too_long,
        /// To a multicast group that has no queue pair.
        unknown_group,
        /// A datagram with another Q_Key than the queue pair's, QP1 included.
        qkey,
        /// An answer to no question of recognition that waits for one, or a message of a later
        /// version.
        unasked_answer,
        /// Questions of recognition that came faster than they are answered.
        too_many_questions,
    }
}

counters! {
    /// The work of one queue pair. Names are those of [`Counters`].
    QpCounters {
        /// Packets handed to the sink.
        sent_pkts,
        /// Payload bytes sent, retransmissions included.
        sent_bytes,
        /// Packets accepted.
        rcvd_pkts,
        /// Payload bytes accepted.
        rcvd_bytes,
        /// Packets sent again. This counter and those below wrap at 2^32.
        retransmitted_pkts,
        /// ACK timeouts.
        local_ack_timeout_err,
        /// NAKs of the peer: a packet is missing there.
        rcvd_seq_err,
        /// NAKs of the peer: it has posted no receive.
        rcvd_rnr_err,
        /// Send requests that succeeded.
        sent_requests,
        /// Messages of the peer that were executed.
        rcvd_requests,
    }
}

counters! {
    /// The work of the transport. Names follow the kernel's `hw_counters` where those exist.
    Counters {
        /// Packets handed to the sink.
        sent_pkts,
        /// Packets accepted by a queue pair.
        rcvd_pkts,
        /// Of the packets sent, those to a multicast group.
        sent_multicast_pkts,
        /// Of the packets accepted, those to a multicast group, each once for all its members.
        rcvd_multicast_pkts,
        /// Payload bytes sent, retransmissions included.
        sent_bytes,
        /// Payload bytes accepted.
        rcvd_bytes,
        /// Acknowledgements sent, without NAKs.
        sent_acks,
        /// Requests that arrived again; on an unreliable connection also those that arrived late.
        duplicate_request,
        /// Responses to requests that were already answered. A repetition of the last
        /// acknowledgement does not count: it may grant credits.
        duplicate_response,
        /// Requests that arrived after a gap.
        out_of_seq_request,
        /// RNR NAKs sent.
        send_rnr_err,
        /// RNR NAKs received.
        rcvd_rnr_err,
        /// NAKs for a sequence error sent.
        sent_seq_err,
        /// NAKs for a sequence error received.
        rcvd_seq_err,
        /// Retransmissions because a later response arrived first.
        implied_nak_seq_err,
        /// Acknowledgement timeouts.
        local_ack_timeout_err,
        /// Queue pairs that gave up on a peer that does not answer.
        retry_exceeded_err,
        /// Queue pairs that gave up on a peer without posted receives.
        retry_rnr_exceeded_err,
        /// Tail probes: packets sent again only to learn the state of earlier ones, because nothing
        /// came back for several round trips or because no packet had asked for an ACK. They cost
        /// no retry.
        tail_probes,
        /// Packets sent again.
        retransmitted_pkts,
        /// Requests refused for a key, range or permission. Requests of an unreliable service are
        /// dropped without any report.
        remote_access_errors,
        /// Requests refused as invalid; those of an unreliable service are dropped.
        remote_invalid_request,
        /// Congestion notifications sent.
        sent_cnp,
        /// Congestion notifications received.
        rcvd_cnp,
        /// Packets accepted with a congestion mark.
        rcvd_ecn_ce,
        /// Packets accepted from a receive queue that was nearly full, because several peers send
        /// at once. They are answered as those with a congestion mark.
        rcvd_overload,
        /// Packets with an IP identification that was solved from the ICRC.
        icrc_id_solved,
        /// Peers that were asked on QP1 whether they are Rocinantes: once each in ten minutes.
        sent_questions,
        /// Peers that asked.
        rcvd_questions,
        /// Answers given.
        sent_answers,
        /// Answers received: peers that are Rocinantes, of this version or another.
        rcvd_answers,
        /// Send requests that succeeded, also those without a completion.
        sent_requests,
        /// Messages of peers that were executed here. A Rocinante may send a WRITE of several
        /// packets as that many messages.
        rcvd_requests,
        /// Microseconds by which deadlines were met late, each by at least a millisecond: the
        /// device was not driven, as its process got no processor.
        undriven_us,
        /// Of these, those since the first timeout of a queue pair that gave up on a peer that
        /// does not answer.
        retry_exceeded_undriven_us,
    }
}

counters! {
    /// The work of the connection manager, and the messages it dropped.
    CmCounters {
        /// Management datagrams handed over for sending.
        sent,
        /// Management datagrams received, bad ones included.
        received,
        /// Not messages of the communication manager.
        malformed,
        /// Messages for unknown connections, from another sender than the peer, or that do not fit
        /// the state.
        stray,
        /// Messages that arrived again.
        duplicates,
        /// Messages sent again because no answer came.
        repeated,
        /// Datagrams not sent because too many waited.
        tx_overflow,
        /// Connections that the program requested.
        connects,
        /// Connection requests handed to the program.
        requests,
        /// Connections established.
        established,
        /// Of these, connections established by a message that arrived before the RTU.
        by_message,
        /// Rejections sent.
        rejects_sent,
        /// Requests refused because a backlog, or the table of connections, was full.
        backlog_overflow,
        /// Rejections received.
        rejects_received,
        /// Waits that ended without a response.
        timeouts,
        /// Connections that the peer had forgotten.
        stale,
        /// Connections ended for devices that shared the address and are gone.
        ended_for_others,
        /// Connections whose peers were asked whether they are still there; each question counts.
        asked_alive,
        /// Connections ended because the peer answered that it does not have them.
        denied,
        /// Connections ended because the peer answered nothing.
        silent_peers,
        /// Notices to peers that a packet of theirs came for a queue pair that does not exist.
        notices,
        /// Datagram services resolved for peers.
        sidr_answered,
    }
}
