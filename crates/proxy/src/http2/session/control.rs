//! Frames that are about the connection, or about how a stream goes on.

use super::{ALIVE, LEAVING, Lost, ROOM, Role, Session, receive::Fatal};
use crate::http2::frame::{self, ACK, Head, Kind, MAX_FRAME, MAX_WINDOW, Reason};

impl Session {
    pub(super) fn settings(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        if !payload.len().is_multiple_of(6) || (head.has(ACK) && !payload.is_empty()) {
            return Err(Reason::FRAME_SIZE);
        }
        if head.has(ACK) {
            return self.chat();
        }
        self.adopt(payload)?;
        self.peer.settled = true;
        frame::head(&mut self.out, Kind::Settings, ACK, 0, 0);
        self.reply()
    }

    /// Does as a peer's settings say.
    pub(super) fn adopt(&mut self, settings: &[u8]) -> Result<(), Fatal> {
        for (id, value) in frame::each_setting(settings) {
            match id {
                1 => self.encoder.resize(value as usize),
                2 if value > 1 || (value == 1 && self.role == Role::Client) => return Err(Reason::PROTOCOL),
                3 => self.peer.streams = value,
                4 => self.set_window(i64::from(value))?,
                5 => {
                    if !(MAX_FRAME..1 << 24).contains(&(value as usize)) {
                        return Err(Reason::PROTOCOL);
                    }
                    // Larger frames would only make the other streams wait.
                    self.peer.frame = MAX_FRAME;
                }
                8 if value > 1 || (value == 0 && self.peer.connect) => return Err(Reason::PROTOCOL),
                8 => self.peer.connect = value == 1,
                _ => {}
            }
        }
        Ok(())
    }

    /// Windows of streams that are there change with the setting, too (section 6.9.2).
    fn set_window(&mut self, window: i64) -> Result<(), Fatal> {
        if window > MAX_WINDOW {
            return Err(Reason::FLOW_CONTROL);
        }
        let change = window - self.peer.window;
        self.peer.window = window;
        if change == 0 {
            return Ok(());
        }
        for stream in self.streams.values_mut() {
            stream.send_window += change;
            if stream.send_window > MAX_WINDOW {
                return Err(Reason::FLOW_CONTROL);
            }
            if stream.send_window > 0 {
                stream.wake(ROOM, &mut self.wakes);
            }
        }
        Ok(())
    }

    pub(super) fn window_update(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if payload.len() != 4 {
            return Err(Reason::FRAME_SIZE);
        }
        let count = i64::from(frame::number(payload)? & 0x7fff_ffff);
        self.chat()?;
        if head.stream == 0 {
            self.send_window += count;
            return match count {
                0 => Err(Reason::PROTOCOL),
                _ if self.send_window > MAX_WINDOW => Err(Reason::FLOW_CONTROL),
                _ => {
                    self.unstall();
                    Ok(())
                }
            };
        }
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL);
        }
        let Some(stream) = self.streams.get_mut(&head.stream).filter(|stream| stream.lost.is_none()) else {
            return Ok(());
        };
        stream.send_window += count;
        if count == 0 {
            return self.break_stream(head.stream, Reason::PROTOCOL);
        }
        if stream.send_window > MAX_WINDOW {
            return self.break_stream(head.stream, Reason::FLOW_CONTROL);
        }
        if stream.send_window > 0 {
            stream.wake(ROOM, &mut self.wakes);
        }
        Ok(())
    }

    pub(super) fn reset_by_peer(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL);
        }
        if payload.len() != 4 {
            return Err(Reason::FRAME_SIZE);
        }
        let reason = Reason(frame::number(payload)?);
        if let Some(stream) = self.streams.get_mut(&head.stream) {
            // A server that has answered says so when it needs no more of the request (section 8.1).
            if self.role == Role::Client && reason == Reason::NONE && stream.received {
                stream.sent = true;
                stream.wake(ROOM, &mut self.wakes);
                self.settle(head.stream);
                return Ok(());
            }
            let over = stream.closed;
            let why = if reason == Reason::REFUSED { Lost::Unprocessed } else { Lost::Reset(reason) };
            if !over {
                self.lose_stream(head.stream, why);
            }
            if over || self.role == Role::Client {
                return self.chat();
            }
        }
        // A client that opens streams only to reset them makes us work for nothing (CVE-2023-44487).
        if self.role == Role::Client || self.resets.take() { self.chat() } else { Err(Reason::CALM) }
    }

    pub(super) fn ping(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        let Ok(content) = <[u8; 8]>::try_from(payload) else { return Err(Reason::FRAME_SIZE) };
        if !head.has(ACK) {
            frame::ping(&mut self.out, ACK, content);
            return self.reply();
        }
        if content == ALIVE && !self.answered {
            self.answered = true;
            return Ok(());
        }
        if content == LEAVING {
            self.refuse();
        }
        self.chat()
    }

    pub(super) fn go_away(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        if payload.len() < 8 {
            return Err(Reason::FRAME_SIZE);
        }
        let last = frame::number(payload)? & 0x7fff_ffff;
        self.peer_leaves = true;
        if self.role == Role::Client {
            let above = self.streams.keys().copied().filter(|id| *id > last).collect::<Vec<_>>();
            for id in above {
                self.lose_stream(id, Lost::Unprocessed);
            }
        }
        self.chat()
    }
}
