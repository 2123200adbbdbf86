//! Client hellos that arrive slowly: the work of a listener before it knows the protocol of a connection.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use crate::stream::Tls;

/// Maximum number of records of a hello.
const RECORDS: usize = 64;
/// Timeout for the proxy to read a record. Under valgrind, the proxy is many times slower than usual.
const TIMEOUT: Duration = Duration::from_secs(60);
const RECORD_HEADER: usize = 5;

/// Opens this number of connections in sequence. Sends a hello on each in [`RECORDS`] records, without the last one.
/// Each record is sent after the proxy has read the previous one.
pub(crate) fn hellos(target: SocketAddr, tls: &Tls, count: u32) -> anyhow::Result<()> {
    let hello = tls.hello()?;
    let (header, message) = hello.split_at_checked(RECORD_HEADER).context("a hello without a header")?;
    let records: Vec<Vec<u8>> = message
        .chunks(message.len().div_ceil(RECORDS))
        .map(|piece| [&header[..3], &[0, piece.len() as u8], piece].concat())
        .collect();
    for _ in 0..count {
        let mut stream = TcpStream::connect(target).with_context(|| format!("cannot connect to {target}"))?;
        stream.set_nodelay(true)?;
        for record in &records[..records.len() - 1] {
            stream.write_all(record)?;
            read_by_peer(&stream)?;
        }
        // One connection at a time: the number of concurrent connections, each with buffers, would depend on the load
        // of the machine.
        stream.shutdown(Shutdown::Write)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        match stream.read_to_end(&mut Vec::new()) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => {
                return Err(error).context("the proxy did not close a connection with an incomplete hello");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Waits until the other end of a local connection has read all sent bytes.
fn read_by_peer(stream: &TcpStream) -> anyhow::Result<()> {
    let ports = format!(":{:04X} 0100007F:{:04X} ", stream.peer_addr()?.port(), stream.local_addr()?.port());
    let deadline = Instant::now() + TIMEOUT;
    loop {
        // `sl local remote state sent:received …`; the format of the kernel is stable (proc_net_tcp.rst).
        let table =
            fs::read_to_string("/proc/thread-self/net/tcp").context("the kernel's table of connections")?;
        let line = table.lines().find(|line| line.contains(&ports)).context("the connection was closed")?;
        if line.split_whitespace().nth(4).is_some_and(|queues| queues.ends_with(":00000000")) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "a record of a hello was not read");
        thread::yield_now();
    }
}
