//! Two connection managers and a wire between them that may lose, repeat and reorder.

mod alive;
mod counts;
mod datagrams;
mod deaths;
mod heirs;
mod hostile;
mod messages;
mod net;
mod places;
mod random;
mod refusals;
mod scenarios;
mod shared;
mod successors;
#[path = "../common/tables.rs"]
mod tables;
mod thirds;
mod twos;
mod values;
