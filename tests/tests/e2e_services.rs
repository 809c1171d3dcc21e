//! Datagram services by the connection manager, between two containers, on every backend.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::services::{
    a_service_is_found_and_used_over_ipv4, a_service_is_found_and_used_over_ipv6,
    nothing_waits_but_descriptors, who_is_not_wanted_hears_why,
};

on_each_backend!(
    a_service_is_found_and_used_over_ipv4,
    a_service_is_found_and_used_over_ipv6,
    who_is_not_wanted_hears_why,
    nothing_waits_but_descriptors,
);
