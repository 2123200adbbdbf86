//! Ways for the fuzz targets to what is the crate's own. Built with the feature `fuzzing` alone, which nothing
//! that is shipped turns on.

use std::net::Ipv4Addr;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;

use crate::{
    dns::{Server, Table},
    names::{Answer, Hosts, Names},
};

/// The DNS server's answer to a message, with two names in its table; `None` where it stays silent.
pub fn dns(message: &[u8]) -> Option<Vec<u8>> {
    let table = Table::default();
    let names = Names::from([
        ("a.b.svc.cluster.local".to_owned(), Answer::Addresses(vec![Ipv4Addr::LOCALHOST; 3])),
        ("c.b.svc.cluster.local".to_owned(), Answer::Alias("a.b.svc.cluster.local".to_owned())),
    ]);
    table.replace(names, Hosts::new());
    let (outside, _told) = mpsc::channel(1);
    let server = Server { table, lookups: None, outside };
    // Without lookups nothing is waited for.
    server.answer(message, 512, Ipv4Addr::LOCALHOST.into()).now_or_never()?
}
