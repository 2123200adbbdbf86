//! Netlink messages that create links, addresses, routes and packet rules.
//!
//! A message is a header, a fixed part and attributes that may nest (linux/netlink.h). [`Message`] builds one as bytes;
//! [`Socket`] sends it and waits for the kernel's answer. A socket stays in the network namespace in which it was
//! opened, also if its thread enters another one. The sandbox relies on that.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
        socket, sockopt,
    },
};

/// Flag of attributes that hold attributes.
const NESTED: u16 = 1 << 15;
/// Size of the send buffer in bytes: tens of thousands of rules.
const SEND_BUFFER: usize = 8 << 20;
/// Length of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;

/// A netlink message under construction.
#[derive(Debug, Clone)]
pub struct Message {
    bytes: Vec<u8>,
    acknowledged: bool,
}

impl Message {
    /// Starts a request of this type, with an acknowledgement. `flags` are added to `NLM_F_REQUEST`.
    pub fn new(kind: u16, flags: i32) -> Self {
        Self::with_flags(kind, flags | libc::NLM_F_ACK, true)
    }

    /// Starts a request without an acknowledgement: the beginning or end of a batch, or a query.
    pub fn unanswered(kind: u16) -> Self {
        Self::with_flags(kind, 0, false)
    }

    fn with_flags(kind: u16, flags: i32, acknowledged: bool) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        let flags = u16::try_from(flags | libc::NLM_F_REQUEST).unwrap_or_default();
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        Self { bytes, acknowledged }
    }

    /// Leaves out the acknowledgement. An error is reported nevertheless.
    pub fn quiet(mut self) -> Self {
        let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]);
        self.bytes[6..8].copy_from_slice(&(flags & !(libc::NLM_F_ACK as u16)).to_ne_bytes());
        Self { acknowledged: false, ..self }
    }

    /// Appends the fixed part, or a piece of it.
    pub fn raw(mut self, part: &[u8]) -> Self {
        self.bytes.extend_from_slice(part);
        self
    }

    /// Appends an attribute.
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// Appends a text with the zero byte that the kernel requires.
    pub fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// Appends a number in network byte order, as nf_tables requires.
    pub fn be32(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// Appends an attribute that holds the attributes that `fill` appends.
    pub fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        let mut filled = fill(self);
        let length = u16::try_from(filled.bytes.len() - start).unwrap_or(u16::MAX);
        filled.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        filled
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        self.pad();
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A netlink socket of one protocol in one network namespace.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens a socket for links, addresses and routes in the calling thread's network namespace.
    pub fn route() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket for packet rules in the calling thread's network namespace.
    pub fn netfilter() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkNetFilter)
    }

    fn open(protocol: SockProtocol) -> io::Result<Self> {
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        // A batch of rules is one datagram. Without the privilege the system's maximum applies.
        if setsockopt(&fd, sockopt::SndBufForce, &SEND_BUFFER).is_err() {
            let _ = setsockopt(&fd, sockopt::SndBuf, &SEND_BUFFER);
        }
        Ok(Self { fd, sequence: 0 })
    }

    /// Sends messages as one datagram and waits for all acknowledgements.
    ///
    /// # Errors
    /// The first error that the kernel reports.
    pub fn request(&mut self, messages: Vec<Message>) -> io::Result<()> {
        let mut waiting = messages.iter().filter(|message| message.acknowledged).count();
        let mut bytes = Vec::new();
        for message in messages {
            self.sequence += 1;
            bytes.extend(message.finish(self.sequence));
        }
        send(self.fd.as_raw_fd(), &bytes, MsgFlags::empty())?;
        // An error repeats the message it is about, so it can be as long as the request.
        let mut buffer = vec![0; (bytes.len() * 2).max(16 << 10)];
        while waiting > 0 {
            let length = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            waiting = waiting.saturating_sub(count_answers(&buffer[..length])?);
        }
        Ok(())
    }

    /// Sends a query and returns the kernel's answer, without its header.
    ///
    /// # Errors
    /// The error that the kernel reports.
    pub fn ask(&mut self, question: Message) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        send(self.fd.as_raw_fd(), &question.finish(self.sequence), MsgFlags::empty())?;
        let mut buffer = vec![0; 4096];
        let length = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        buffer.truncate(length);
        count_answers(&buffer)?;
        Ok(buffer.split_off(HEADER.min(length)))
    }
}

/// Assigns an address to an interface.
///
/// # Errors
/// The kernel's error; `EEXIST` if the interface has the address.
pub fn assign(socket: &mut Socket, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    let message = Message::new(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_EXCL)
        .raw(&[family as u8, prefix, 0, libc::RT_SCOPE_UNIVERSE])
        .raw(&index.to_ne_bytes())
        .attribute(libc::IFA_LOCAL, &bytes)
        .attribute(libc::IFA_ADDRESS, &bytes);
    socket.request(vec![message])
}

/// Counts the acknowledgements in a datagram. Fails with the first error in it.
fn count_answers(mut bytes: &[u8]) -> io::Result<usize> {
    let mut count = 0;
    while bytes.len() >= HEADER + 4 {
        let length = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if i32::from(u16::from_ne_bytes([bytes[4], bytes[5]])) == libc::NLMSG_ERROR {
            let code = i32::from_ne_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
            if code != 0 {
                return Err(Errno::from_raw(-code).into());
            }
            count += 1;
        }
        bytes = bytes.get(length.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nested_ones_hold_their_length() {
        let message = Message::new(16, 0)
            .raw(&[1, 2, 3, 4])
            .text(3, "lo")
            .nested(5, |inner| inner.be32(1, 7).attribute(2, &[9]));
        let bytes = message.finish(1);
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(bytes[0] as usize, bytes.len());
        let body = &bytes[HEADER..];
        assert_eq!(body[..12], [1, 2, 3, 4, 7, 0, 3, 0, b'l', b'o', 0, 0]);
        assert_eq!(body[12..20], [20, 0, 5, 0x80, 8, 0, 1, 0]);
        assert_eq!(body[20..], [0, 0, 0, 7, 5, 0, 2, 0, 9, 0, 0, 0]);
    }

    #[test]
    fn an_error_of_the_kernel_is_returned() {
        let mut answer = vec![0; HEADER + 4];
        answer[0] = 20;
        answer[4] = 2;
        assert_eq!(count_answers(&answer).unwrap(), 1);
        answer[16..20].copy_from_slice(&(-libc::EEXIST).to_ne_bytes());
        assert_eq!(count_answers(&answer).unwrap_err().raw_os_error(), Some(libc::EEXIST));
    }
}
