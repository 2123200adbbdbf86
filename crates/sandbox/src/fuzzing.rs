//! Private functions for the fuzz targets. Built with the feature `fuzzing` only, which no released program enables.

use std::net::Ipv4Addr;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;

use crate::{
    dns::{Server, Table},
    names::{Answer, Hosts, Names},
};

/// Returns the DNS server's answer to a message, with two names in its table; `None` if there is no answer.
pub fn dns(message: &[u8]) -> Option<Vec<u8>> {
    let table = Table::default();
    let names = Names::from([
        ("a.b.svc.cluster.local".to_owned(), Answer::Addresses(vec![Ipv4Addr::LOCALHOST; 3])),
        ("c.b.svc.cluster.local".to_owned(), Answer::Alias("a.b.svc.cluster.local".to_owned())),
    ]);
    table.replace(names, Hosts::new());
    let (outside, _told) = mpsc::channel(1);
    let server = Server { table, lookups: None, outside };
    // Without lookups, the future is ready at once.
    server.answer(message, 512, Ipv4Addr::LOCALHOST.into()).now_or_never()?
}
