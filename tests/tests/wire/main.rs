//! The wire formats beside captures of Linux, scapy and tshark; and hostile bytes.

mod captures;
mod cm;
mod cm_live;
mod hostile;
mod opcodes;
mod witnesses;
