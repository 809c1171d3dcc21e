//! Two connection managers and a wire between them that may lose, repeat and reorder.

mod datagrams;
mod deaths;
mod hostile;
mod messages;
mod net;
mod random;
mod scenarios;
mod thirds;
