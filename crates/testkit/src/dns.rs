//! DNS server for tests. It sends the answers that the test configures, or none, and counts queries.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME, SOA},
    },
};

/// Maximum size of an answer by UDP in bytes (RFC 1035, section 4.2.1).
const MAX_UDP_BYTES: usize = 512;

/// Configured answer for a name. A name without one gets NXDOMAIN.
#[derive(Clone, Debug)]
pub enum DnsAnswer {
    /// Addresses, with this TTL in seconds.
    Addresses(Vec<IpAddr>, u32),
    /// Alias (CNAME) of another name, with this TTL in seconds.
    Alias(String, u32),
    /// No addresses; with a negative TTL in seconds (RFC 2308) if present.
    NoAddresses(Option<u32>),
    /// An error code.
    Error(ResponseCode),
    /// No response at all.
    Silent,
}

/// Running server on UDP and TCP of a loopback port, until the process exits.
#[derive(Clone, Debug)]
pub struct Dns {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    answers: Mutex<BTreeMap<String, DnsAnswer>>,
    udp: AtomicU64,
    tcp: AtomicU64,
}

impl Dns {
    /// Starts a server without names.
    pub fn start() -> Self {
        let (udp, tcp) = bind();
        let server = Self { address: tcp.local_addr().unwrap(), state: Arc::default() };
        let state = Arc::clone(&server.state);
        thread::spawn(move || serve_udp(&udp, |query| state.udp_messages(query)));
        let state = Arc::clone(&server.state);
        thread::spawn(move || serve_tcp(&tcp, |query| state.tcp_bytes(query)));
        server
    }

    /// Starts a server whose responses the test composes, and returns its address. `udp` returns the messages to send
    /// for each query over UDP. `tcp` returns the bytes to send for each query over TCP; then the connection is closed.
    pub fn start_raw(
        udp: impl FnMut(&[u8]) -> Vec<Vec<u8>> + Send + 'static,
        tcp: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static,
    ) -> SocketAddr {
        let (socket, listener) = bind();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve_udp(&socket, udp));
        thread::spawn(move || serve_tcp(&listener, tcp));
        address
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the answer for a name.
    pub fn set_answer(&self, name: &str, answer: DnsAnswer) {
        self.state.answers.lock().unwrap().insert(name.to_owned(), answer);
    }

    /// Sets the addresses of a name.
    pub fn set_addresses(&self, name: &str, addresses: &[&str], ttl: u32) {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        self.set_answer(name, DnsAnswer::Addresses(addresses, ttl));
    }

    /// Returns the number of queries so far, by UDP and by TCP.
    pub fn queries(&self) -> (u64, u64) {
        (self.state.udp.load(Ordering::Relaxed), self.state.tcp.load(Ordering::Relaxed))
    }
}

/// Binds both protocols to the same free port.
fn bind() -> (UdpSocket, TcpListener) {
    loop {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) {
            return (udp, tcp);
        }
    }
}

fn serve_udp(socket: &UdpSocket, mut respond: impl FnMut(&[u8]) -> Vec<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        for message in respond(&buffer[..length]) {
            let _ = socket.send_to(&message, from);
        }
    }
}

fn serve_tcp(listener: &TcpListener, mut respond: impl FnMut(&[u8]) -> Vec<u8>) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut length = [0; 2];
        if stream.read_exact(&mut length).is_err() {
            continue;
        }
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        if stream.read_exact(&mut query).is_err() {
            continue;
        }
        let _ = stream.write_all(&respond(&query));
    }
}

impl State {
    /// Returns the response by UDP, truncated if it is too long; empty for no response.
    fn udp_messages(&self, query: &[u8]) -> Vec<Vec<u8>> {
        self.udp.fetch_add(1, Ordering::Relaxed);
        let Some(reply) = self.reply(query) else { return Vec::new() };
        let bytes = reply.to_vec().unwrap();
        vec![if bytes.len() > MAX_UDP_BYTES { reply.truncate().to_vec().unwrap() } else { bytes }]
    }

    /// Returns the response by TCP with its length before it; empty for no response.
    fn tcp_bytes(&self, query: &[u8]) -> Vec<u8> {
        self.tcp.fetch_add(1, Ordering::Relaxed);
        let Some(reply) = self.reply(query) else { return Vec::new() };
        let bytes = reply.to_vec().unwrap();
        let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
        [&length, bytes.as_slice()].concat()
    }

    fn reply(&self, bytes: &[u8]) -> Option<Message> {
        let request = Message::from_vec(bytes).ok()?;
        let query = request.queries.first()?.clone();
        let mut reply = Message::response(request.metadata.id, request.metadata.op_code);
        reply.add_queries(request.queries);
        let answers = self.answers.lock().unwrap();
        let mut name = query.name().clone();
        loop {
            match answers.get(name.to_ascii().to_lowercase().trim_end_matches('.')) {
                Some(DnsAnswer::Silent) => return None,
                Some(DnsAnswer::Error(code)) => reply.metadata.response_code = *code,
                Some(DnsAnswer::Alias(target, ttl)) => {
                    let target = Name::from_ascii(format!("{target}.")).unwrap();
                    reply.add_answer(Record::from_rdata(name, *ttl, RData::CNAME(CNAME(target.clone()))));
                    name = target;
                    continue;
                }
                Some(DnsAnswer::NoAddresses(soa)) => {
                    if let Some(minimum) = soa {
                        reply.add_authority(Record::from_rdata(name, 86_400, authority(*minimum)));
                    }
                }
                Some(DnsAnswer::Addresses(addresses, ttl)) => {
                    let data = addresses.iter().filter_map(|ip| match (ip, query.query_type()) {
                        (IpAddr::V4(ip), RecordType::A) => Some(RData::A(A(*ip))),
                        (IpAddr::V6(ip), RecordType::AAAA) => Some(RData::AAAA(AAAA(*ip))),
                        _ => None,
                    });
                    reply.add_answers(data.map(|data| Record::from_rdata(name.clone(), *ttl, data)));
                }
                None => {
                    reply.metadata.response_code = ResponseCode::NXDomain;
                    reply.add_authority(Record::from_rdata(name, 30, authority(86_400)));
                }
            }
            return Some(reply);
        }
    }
}

fn authority(minimum: u32) -> RData {
    RData::SOA(SOA::new(Name::root(), Name::root(), 1, 60, 60, 60, minimum))
}
