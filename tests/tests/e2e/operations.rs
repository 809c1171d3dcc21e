//! Every operation between two containers: on every backend, over IPv4 and IPv6, at three path
//! MTUs, at sizes around packet borders. All bytes are compared, also those around the target.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::TESTS;

on_each_backend!(operations::*);

#[test]
fn no_cell_is_missing() {
    let cells = TESTS.iter().filter_map(|test| test.name.strip_prefix("operations::"));
    let mtus = |family| [256, 1024, 4096].map(|mtu| format!("{family}_{mtu}"));
    assert!(cells.eq(["ipv4", "ipv6"].into_iter().flat_map(mtus)));
}
