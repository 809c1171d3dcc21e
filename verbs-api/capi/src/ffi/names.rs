//! Words for numbers, and rates.

use std::ffi::{CStr, c_char, c_int};

fn word(words: &[&'static CStr], at: c_int, unknown: &'static CStr) -> *const c_char {
    usize::try_from(at).ok().and_then(|at| words.get(at)).copied().unwrap_or(unknown).as_ptr()
}

/// `ibv_event_type_str(3)`.
pub(super) extern "C" fn event_type_str(event: c_int) -> *const c_char {
    const WORDS: [&CStr; 20] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    word(&WORDS, event, c"unknown")
}

/// `ibv_node_type_str(3)`.
pub(super) extern "C" fn node_type_str(node: c_int) -> *const c_char {
    const WORDS: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    word(&WORDS, node, c"unknown")
}

/// `ibv_port_state_str(3)`.
pub(super) extern "C" fn port_state_str(state: c_int) -> *const c_char {
    const WORDS: [&CStr; 6] =
        [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active deferred"];
    word(&WORDS, state, c"unknown")
}

/// `ibv_wc_status_str(3)`.
pub(super) extern "C" fn wc_status_str(status: c_int) -> *const c_char {
    const WORDS: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    word(&WORDS, status, c"unknown")
}

/// `enum ibv_rate`, the multiple of 2.5 Gb/s if it is a whole one, and the rate in Mb/s.
const RATES: [(c_int, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 0, 14_062),
    (12, 0, 56_250),
    (13, 0, 112_500),
    (14, 0, 168_750),
    (15, 0, 25_781),
    (16, 0, 103_125),
    (17, 0, 206_250),
    (18, 0, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

/// `ibv_rate_to_mult(3)`: -1 if there is none.
pub(super) extern "C" fn rate_to_mult(rate: c_int) -> c_int {
    let found = RATES.iter().find(|row| row.0 == rate && row.1 != 0);
    found.map_or(-1, |row| row.1)
}

/// `mult_to_ibv_rate(3)`: `IBV_RATE_MAX` if there is none.
pub(super) extern "C" fn mult_to_rate(mult: c_int) -> c_int {
    RATES.iter().find(|row| row.1 == mult && mult != 0).map_or(0, |row| row.0)
}

/// `ibv_rate_to_mbps(3)`: -1 if there is none.
pub(super) extern "C" fn rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|row| row.0 == rate).map_or(-1, |row| row.2)
}

/// `mbps_to_ibv_rate(3)`: `IBV_RATE_MAX` if there is none.
pub(super) extern "C" fn mbps_to_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|row| row.2 == mbps).map_or(0, |row| row.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As rdma-core 44 prints them: of newer rates the multiple is rounded, so the two differ.
    #[test]
    fn rates_are_those_of_rdma_core() {
        const NEW: [(c_int, c_int, c_int); 5] = [
            (20, 20, 53_125),
            (21, 160, 425_000),
            (22, 240, 637_500),
            (23, 320, 850_000),
            (24, 480, 1_275_000),
        ];
        for (rate, mult, mbps) in NEW {
            assert_eq!((rate_to_mult(rate), rate_to_mbps(rate)), (mult, mbps));
            assert_eq!((mult_to_rate(mult), mbps_to_rate(mbps)), (rate, rate));
            assert_eq!(mbps_to_rate(mult * 2_500), 0);
        }
        assert_eq!([rate_to_mult(25), rate_to_mbps(25), rate_to_mult(11)], [-1; 3]);
        assert_eq!((mult_to_rate(0), rate_to_mbps(11), mbps_to_rate(14_062)), (0, 14_062, 11));
    }
}
