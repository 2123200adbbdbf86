//! A DNS server that counts queries: each name has one IPv4 address and no IPv6 address (RFC 1035, RFC 2308).

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// Maximum length of a query, in bytes.
const MAX_QUERY: usize = 512;
const HEADER: usize = 12;
/// Length of the type and the class of a question.
const QUESTION_END: usize = 4;
const A: u16 = 1;
const SOA: u16 = 6;
const AAAA: u16 = 28;
/// TTL of an answer without addresses, in seconds.
const NEGATIVE_TTL: u32 = 30;

/// Numbers of queries so far.
#[derive(Debug, Default)]
pub(super) struct QueryCounter {
    v4: AtomicU64,
    v6: AtomicU64,
}

impl QueryCounter {
    /// Returns the number of queries for IPv4 and for IPv6 addresses.
    pub(super) fn now(&self) -> [u64; 2] {
        [&self.v4, &self.v6].map(|counter| counter.load(Ordering::Relaxed))
    }
}

/// Starts the server for the rest of the process. `ttl` is the TTL of addresses in seconds.
pub(super) fn start(ttl: u32) -> io::Result<(SocketAddr, Arc<QueryCounter>)> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let (address, questions) = (socket.local_addr()?, Arc::new(QueryCounter::default()));
    let counted = Arc::clone(&questions);
    thread::spawn(move || {
        let mut buffer = [0; MAX_QUERY];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let Some((kind, answer)) = answer(&buffer[..length], ttl) else { continue };
            match kind {
                A => counted.v4.fetch_add(1, Ordering::Relaxed),
                AAAA => counted.v6.fetch_add(1, Ordering::Relaxed),
                _ => 0,
            };
            // The client may be gone.
            let _ = socket.send_to(&answer, from);
        }
    });
    Ok((address, questions))
}

/// Returns the type of a query and its answer.
fn answer(question: &[u8], ttl: u32) -> Option<(u16, Vec<u8>)> {
    let name = question.get(HEADER..)?;
    let mut end = 0;
    while let length @ 1.. = usize::from(*name.get(end)?) {
        end += length + 1;
    }
    let question = question.get(..HEADER + end + 1 + QUESTION_END)?;
    let kind = u16::from_be_bytes(question[question.len() - QUESTION_END..][..2].try_into().ok()?);
    let mut answer = question.to_vec();
    // A response with recursion desired and available and no error; one question, no additional records.
    answer[2..4].copy_from_slice(&[0x81, 0x80]);
    answer[4..HEADER].copy_from_slice(&[0, 1, 0, u8::from(kind == A), 0, u8::from(kind != A), 0, 0]);
    // A pointer to the name in the question.
    answer.extend([0xc0, 12]);
    let mut record = |kind: u16, ttl: u32, data: &[u8]| {
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1]);
        answer.extend(ttl.to_be_bytes());
        answer.extend(u16::try_from(data.len()).unwrap_or_default().to_be_bytes());
        answer.extend(data);
    };
    if kind == A {
        record(A, ttl, &[10, 0, 0, 1]);
    } else {
        let numbers = [1, 60, 60, 60, NEGATIVE_TTL].map(u32::to_be_bytes).concat();
        record(SOA, NEGATIVE_TTL, &[&[0, 0], numbers.as_slice()].concat());
    }
    Some((kind, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_answered_by_type() {
        let mut question = vec![1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 1, b'b', 0, 0, 1, 0, 1];
        let (kind, reply) = answer(&question, 5).unwrap();
        assert_eq!((kind, &reply[..2], reply[7], reply[9]), (A, &[1, 2][..], 1, 0));
        assert_eq!(&reply[question.len()..], [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 0, 0, 1]);
        question[18] = 28;
        let (kind, reply) = answer(&question, 5).unwrap();
        assert_eq!((kind, reply[7], reply[9]), (AAAA, 0, 1));
        assert_eq!(reply.len(), question.len() + 12 + 22);
        for cut in 0..question.len() {
            assert_eq!(answer(&question[..cut], 5), None);
        }
    }
}
