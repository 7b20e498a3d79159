"""seqlab: what can a sequence architecture remember, and does it know what order the words came in?"""
