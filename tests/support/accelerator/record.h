// A record of what the hosts enqueue and wait for, from which times are computed afterwards (timeline.py). No clock is read.
// Its lines, where a position is the number of a piece of work on its stream:
//   kernel DEVICE STREAM POSITION NAME OPERATIONS BYTES
//   wait DEVICE STREAM POSITION, and the device, the stream and the position that are waited for
//   collective DEVICE STREAM POSITION KEY MEMBERS KIND BYTES: those that this rank receives
//   host DEVICE STREAM POSITION: the host of the device has waited for it
//   mark DEVICE NUMBER: the host has come to a place of its program
#pragma once

#include <sstream>
#include <string>

namespace accelerator {

class Record {
 public:
  bool on = false;

  void start(bool from_now_on) {
    on = from_now_on;
    lines_.str("");
    lines_.precision(17);
  }

  // One line: its parts with blanks between them. The lines of one device are in the order of its host.
  template <class... Parts>
  void add(const Parts&... parts) {
    if (!on)
      return;
    ((lines_ << parts << ' '), ...);
    lines_ << '\n';
  }

  const char* text() {
    text_ = lines_.str();
    return text_.c_str();
  }

 private:
  std::ostringstream lines_;
  std::string text_;
};

}  // namespace accelerator
