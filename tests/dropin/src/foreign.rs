//! Programs for another processor, under its emulator.

use crate::table::{self, Row};

/// Which side is foreign, the client or the server, and how a line says so.
pub const SIDES: [([bool; 2], &str); 3] = [
    ([true, true], "both foreign"),
    ([true, false], "client foreign"),
    ([false, true], "server foreign"),
];

/// Their programs and modes.
const ROWS: [(&str, &str); 17] = [
    ("ibv_devices", ""),
    ("ibv_devinfo", "-v"),
    ("ibv_rc_pingpong", "-c"),
    ("ibv_rc_pingpong", "-e -c"),
    ("ibv_rc_pingpong", "-N -c"),
    ("ibv_rc_pingpong", "-o -c"),
    ("ibv_uc_pingpong", "-e -c"),
    ("ibv_ud_pingpong", "-e -c"),
    ("ibv_srq_pingpong", "-e -c"),
    ("ib_write_bw", ""),
    ("ib_send_lat", ""),
    ("ib_read_bw", "-e"),
    ("ib_atomic_lat", ""),
    ("rping", "-V"),
    ("ucmatose", "-c 10 -C 10"),
    ("udaddy", "-c 4"),
    ("ib_write_bw", "-R"),
];

/// The rows of the table that also run on another processor's emulator, on `udp`. Panics if the
/// table has one of them no longer.
#[must_use]
pub fn rows() -> Vec<Row> {
    let rows = table::rows();
    let find = |(program, mode)| {
        let is_it = |row: &&Row| (row.program, row.mode, row.netdev) == (program, mode, "udp");
        *rows.iter().find(is_it).expect("a row of the table")
    };
    ROWS.into_iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_for_another_processor_are_of_the_table_and_on_udp() {
        let rows = rows();
        assert_eq!(rows.len(), ROWS.len());
        assert!(rows.iter().all(|row| row.netdev == "udp"));
        assert!(rows[0].is_alone() && !rows[2].is_alone());
    }
}
