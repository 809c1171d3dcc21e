//! Two connection managers and a wire between them that may lose and repeat.

mod alive;
mod counts;
mod datagrams;
mod deaths;
mod heirs;
mod hostile;
mod messages;
mod net;
mod places;
mod refusals;
mod scenarios;
mod shared;
mod successors;
#[path = "../common/tables.rs"]
mod tables;
mod thirds;
mod twos;
mod values;
