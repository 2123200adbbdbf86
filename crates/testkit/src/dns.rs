//! DNS server for tests. It answers as the test configures, counts queries, and can stay silent.

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
const LONGEST_UDP: usize = 512;

/// Configured answer for a name. A name without one gets NXDOMAIN.
#[derive(Clone, Debug)]
pub enum Say {
    /// Addresses, with this TTL in seconds.
    Addresses(Vec<IpAddr>, u32),
    /// Alias (CNAME) of another name, with this TTL in seconds.
    Alias(String, u32),
    /// No addresses; with a negative TTL in seconds (RFC 2308) if present.
    Nothing(Option<u32>),
    /// An error code.
    Code(ResponseCode),
    /// No response at all.
    Silence,
}

/// Running server on UDP and TCP of a loopback port, until the process exits.
#[derive(Clone, Debug)]
pub struct Dns {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    names: Mutex<BTreeMap<String, Say>>,
    udp: AtomicU64,
    tcp: AtomicU64,
}

impl Dns {
    /// Starts a server without names.
    pub fn start() -> Self {
        let (udp, tcp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
            // The same port must be free for both protocols.
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) {
                break (udp, tcp);
            }
        };
        let server = Self { address: tcp.local_addr().unwrap(), state: Arc::default() };
        let state = Arc::clone(&server.state);
        thread::spawn(move || serve_udp(&udp, &state));
        let state = Arc::clone(&server.state);
        thread::spawn(move || serve_tcp(&tcp, &state));
        server
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the answer for a name.
    pub fn say(&self, name: &str, what: Say) {
        self.state.names.lock().unwrap().insert(name.to_owned(), what);
    }

    /// Sets the addresses of a name.
    pub fn addresses(&self, name: &str, addresses: &[&str], ttl: u32) {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        self.say(name, Say::Addresses(addresses, ttl));
    }

    /// Returns the number of queries so far, by UDP and by TCP.
    pub fn questions(&self) -> (u64, u64) {
        (self.state.udp.load(Ordering::Relaxed), self.state.tcp.load(Ordering::Relaxed))
    }
}

fn serve_udp(socket: &UdpSocket, state: &State) {
    let mut buffer = [0; 4096];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        state.udp.fetch_add(1, Ordering::Relaxed);
        let Some(reply) = state.reply(&buffer[..length]) else { continue };
        let mut bytes = reply.to_vec().unwrap();
        if bytes.len() > LONGEST_UDP {
            bytes = reply.truncate().to_vec().unwrap();
        }
        let _ = socket.send_to(&bytes, from);
    }
}

fn serve_tcp(listener: &TcpListener, state: &State) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut length = [0; 2];
        if stream.read_exact(&mut length).is_err() {
            continue;
        }
        let mut bytes = vec![0; usize::from(u16::from_be_bytes(length))];
        if stream.read_exact(&mut bytes).is_err() {
            continue;
        }
        state.tcp.fetch_add(1, Ordering::Relaxed);
        if let Some(reply) = state.reply(&bytes) {
            let bytes = reply.to_vec().unwrap();
            let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
            let _ = stream.write_all(&[&length, bytes.as_slice()].concat());
        }
    }
}

impl State {
    fn reply(&self, bytes: &[u8]) -> Option<Message> {
        let request = Message::from_vec(bytes).ok()?;
        let query = request.queries.first()?.clone();
        let mut reply = Message::response(request.metadata.id, request.metadata.op_code);
        reply.add_queries(request.queries);
        let names = self.names.lock().unwrap();
        let mut name = query.name().clone();
        loop {
            match names.get(name.to_ascii().to_lowercase().trim_end_matches('.')) {
                Some(Say::Silence) => return None,
                Some(Say::Code(code)) => reply.metadata.response_code = *code,
                Some(Say::Alias(target, ttl)) => {
                    let target = Name::from_ascii(format!("{target}.")).unwrap();
                    reply.add_answer(Record::from_rdata(name, *ttl, RData::CNAME(CNAME(target.clone()))));
                    name = target;
                    continue;
                }
                Some(Say::Nothing(soa)) => {
                    if let Some(minimum) = soa {
                        reply.add_authority(Record::from_rdata(name, 86_400, authority(*minimum)));
                    }
                }
                Some(Say::Addresses(addresses, ttl)) => {
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
