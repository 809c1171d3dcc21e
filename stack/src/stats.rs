//! Counters: why packets were dropped, and what the transport did. They only grow.

macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $( $(#[$doc:meta])* $field:ident, )* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$doc])* pub $field: u64, )*
        }

        impl $name {
            /// Adds those of another.
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
        /// A reserved opcode, or one of a transport that is not spoken here.
        unknown_opcode,
        /// Transport header version other than 0.
        version,
        /// No such queue pair, or one that does not receive in its state.
        unknown_qpn,
        /// The partition key does not match.
        pkey,
        /// Not from the connected peer's address, or not to ours: to a group, but for one queue pair.
        wrong_source,
        /// The ICRC is wrong.
        icrc,
        /// An opcode of another service than the queue pair's.
        wrong_service,
        /// A response that answers nothing: a PSN that was never sent.
        ghost_response,
        /// An acknowledgement with a reserved syndrome.
        bad_syndrome,
        /// A duplicate READ or atomic whose record is gone or does not match, or of which the memory is gone.
        stale_duplicate,
        /// A request after a gap, beyond the one that was answered with a NAK.
        out_of_sequence,
        /// A packet of an unreliable connection's message of which another was lost or refused.
        incomplete,
        /// A message of an unreliable queue pair for which no receive was posted.
        no_receive,
        /// A message of an unreliable queue pair longer than its receive.
        too_long,
        /// For a multicast group to which no queue pair is attached.
        unknown_group,
        /// A datagram with another Q_Key than the queue pair's, QP1 included.
        qkey,
    }
}

counters! {
    /// What the transport did. Names follow the kernel's `hw_counters` where there is one.
    Counters {
        /// Packets handed to the sink.
        sent_pkts,
        /// Packets accepted by a queue pair.
        rcvd_pkts,
        /// Payload bytes sent, retransmissions included.
        sent_bytes,
        /// Payload bytes accepted.
        rcvd_bytes,
        /// Acknowledgements sent, NAKs left out.
        sent_acks,
        /// Requests that arrived again, on an unreliable connection also too late.
        duplicate_request,
        /// Responses to what had been answered, but for the last acknowledgement again, which may grant credits.
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
        /// Retransmissions because a response was overtaken.
        implied_nak_seq_err,
        /// Acknowledgement timeouts.
        local_ack_timeout_err,
        /// Queue pairs that gave up on a silent peer.
        retry_exceeded_err,
        /// Queue pairs that gave up on a peer without receives.
        retry_rnr_exceeded_err,
        /// Packets sent again only to ask what became of them, because nothing came back for several round trips or nothing had asked. They cost no retry.
        tail_probes,
        /// Packets sent again.
        retransmitted_pkts,
        /// Requests refused for a key, range or permission; unreliable ones are dropped, and nobody hears of it.
        remote_access_errors,
        /// Requests refused as invalid; unreliable ones are dropped.
        remote_invalid_request,
        /// Congestion notifications sent.
        sent_cnp,
        /// Congestion notifications received.
        rcvd_cnp,
        /// Packets accepted with a congestion mark.
        rcvd_ecn_ce,
        /// Packets whose IP identification was solved from the ICRC.
        icrc_id_solved,
    }
}

counters! {
    /// What the connection manager did and dropped.
    CmCounters {
        /// Management datagrams handed over for sending.
        sent,
        /// Management datagrams received, bad ones included.
        received,
        /// Not messages of the communication manager.
        malformed,
        /// Messages for connections that there are not, or from another than the peer, or that do not fit the state.
        stray,
        /// Messages that arrived again.
        duplicates,
        /// Messages sent again because no answer came.
        repeated,
        /// Datagrams not sent because too many waited.
        tx_overflow,
        /// Connections asked for.
        connects,
        /// Requests for connections handed to the program.
        requests,
        /// Connections established.
        established,
        /// Of these, by a message that arrived before the RTU.
        by_message,
        /// Rejections sent.
        rejects_sent,
        /// Requests refused because a backlog was full, or everything.
        backlog_overflow,
        /// Rejections received.
        rejects_received,
        /// Waits that ended without an answer.
        timeouts,
        /// Connections that the peer had forgotten.
        stale,
        /// Datagram services resolved for peers.
        sidr_answered,
    }
}
