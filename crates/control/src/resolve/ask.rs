//! One question to the DNS servers, and what their answer means (RFC 1035, RFC 2308).
//!
//! Names are asked for as they stand: there is no search list, as whose it would be is not known. Each question goes out
//! by a socket and under a number of its own, which nobody can foresee, so that nobody else can answer it (RFC 5452).

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use super::system::Servers;
use crate::metrics::{Metrics, count};

/// A name may stand for another so many times over.
const LONGEST_CHAIN: usize = 16;
/// The longest message that comes by UDP, from servers that know no better.
const LONGEST_UDP: usize = 4096;

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Family {
    /// `A` records.
    V4,
    /// `AAAA` records.
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    const fn record(self) -> RecordType {
        match self {
            Self::V4 => RecordType::A,
            Self::V6 => RecordType::AAAA,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.record())
    }
}

/// What DNS says of the addresses of one family that a name has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// These, in the order of the answer, for so long.
    Addresses(Vec<IpAddr>, Duration),
    /// None, for so long if that was said: the name does not exist (`NXDOMAIN`), or has no such addresses.
    Nothing {
        /// There is no such name at all.
        missing: bool,
        /// How long that holds.
        ttl: Option<Duration>,
    },
}

/// Why there is no answer, for people.
pub(crate) type Failure = Arc<str>;

/// Asks one server after the other, until one answers.
pub(crate) async fn ask(
    servers: &Servers,
    metrics: &Metrics,
    name: &str,
    family: Family,
) -> Result<Answer, Failure> {
    // The dot at the end: it is the whole name.
    let name = Name::from_ascii(format!("{name}.")).map_err(|error| failure(&error))?;
    let query = Query::query(name, family.record());
    let mut last = Failure::from("there are no DNS servers");
    for _ in 0..servers.attempts {
        for server in &servers.addresses {
            match timeout(servers.timeout, exchange(*server, metrics, &query)).await {
                Ok(Ok(message)) => match read(&message, &query) {
                    Ok(answer) => return Ok(answer),
                    Err(code) => last = format!("{server} answers {code}").into(),
                },
                Ok(Err(error)) => last = format!("{server}: {error}").into(),
                Err(_) => last = format!("{server} does not answer within {:?}", servers.timeout).into(),
            }
        }
    }
    Err(last)
}

fn failure(error: &dyn fmt::Display) -> Failure {
    error.to_string().into()
}

/// Asks by UDP, and again by TCP if the answer does not fit.
async fn exchange(server: SocketAddr, metrics: &Metrics, query: &Query) -> io::Result<Message> {
    let mut request = Message::new(number()?, MessageType::Query, OpCode::Query);
    request.metadata.recursion_desired = true;
    request.add_query(query.clone());
    let bytes = request.to_vec().map_err(io::Error::other)?;
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    count(&metrics.dns_queries_udp);
    socket.send(&bytes).await?;
    let mut buffer = vec![0; LONGEST_UDP];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match response(&buffer[..length], &request) {
            Some(message) if message.metadata.truncation => break,
            Some(message) => return Ok(message),
            // Somebody else's; ours may come still.
            None => {}
        }
    }
    count(&metrics.dns_queries_tcp);
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat()).await?;
    let mut bytes = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut bytes).await?;
    response(&bytes, &request).ok_or_else(|| io::Error::other("its answer by TCP is not to our question"))
}

/// A number nobody can foresee.
fn number() -> io::Result<u16> {
    let mut bytes = [0; 2];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|_| io::Error::other("there are no random numbers"))?;
    Ok(u16::from_be_bytes(bytes))
}

/// The message, if it answers this request.
fn response(bytes: &[u8], request: &Message) -> Option<Message> {
    let message = Message::from_vec(bytes).ok()?;
    let answers = message.metadata.id == request.metadata.id
        && message.metadata.message_type == MessageType::Response
        && message.queries == request.queries;
    answers.then_some(message)
}

/// What a message says; with another code the server has no answer.
fn read(message: &Message, query: &Query) -> Result<Answer, ResponseCode> {
    let code = message.metadata.response_code;
    if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        return Err(code);
    }
    let (mut name, mut ttl) = (query.name().clone(), u32::MAX);
    for _ in 0..LONGEST_CHAIN {
        let of_name = || message.answers.iter().filter(|record| record.name == name);
        let found = of_name().filter(|record| record.record_type() == query.query_type());
        let (mut addresses, mut shortest) = (Vec::new(), ttl);
        for record in found {
            addresses.extend(record.data.ip_addr());
            shortest = shortest.min(record.ttl);
        }
        if !addresses.is_empty() {
            return Ok(Answer::Addresses(addresses, seconds(shortest)));
        }
        let alias = of_name().find_map(|record| match &record.data {
            RData::CNAME(alias) => Some((alias.0.clone(), record.ttl)),
            _ => None,
        });
        let Some((target, of_alias)) = alias else { break };
        (name, ttl) = (target, ttl.min(of_alias));
    }
    // RFC 2308, section 5: as long as the zone's own record says, and no longer than this record may be kept.
    let soa = message.authorities.iter().find_map(|record| match &record.data {
        RData::SOA(soa) => Some(seconds(record.ttl.min(soa.minimum).min(ttl))),
        _ => None,
    });
    Ok(Answer::Nothing { missing: code == ResponseCode::NXDomain, ttl: soa })
}

fn seconds(ttl: u32) -> Duration {
    // RFC 2181, section 8: what has the highest bit counts as nothing.
    Duration::from_secs(if ttl > i32::MAX as u32 { 0 } else { ttl.into() })
}

#[cfg(test)]
mod tests;
