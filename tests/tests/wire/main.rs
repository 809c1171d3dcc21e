//! The wire formats beside those who know them: captures of Linux, scapy and tshark; hostile bytes.

mod captures;
mod cm;
mod cm_live;
mod hostile;
mod opcodes;
mod witnesses;
